"""The target's first layers guess. Source: arXiv 2404.16710, section 4.3 (self-speculation)."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledStep
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.sampling.sampler import Sampler
from octavo.speculative.coverage import SharedCoverage
from octavo.speculative.drafting_loop import DraftingLoop
from octavo.speculative.proposer import Capabilities, DraftTask
from octavo.speculative.registry import Options, Target, register


@register("layer_skip")
def build(options: Options, target: Target) -> LayerSkip:
    """The first `num_layers` layers; a quarter of them, if it isn't said how many."""
    if target.num_stages > 1:
        raise ConfigError(
            "--speculative-config: layer_skip guesses with the model's first layers, and under "
            "--pipeline-parallel-size these are on another stage than the last; use ngram, suffix, "
            "draft_model or eagle3, or --tensor-parallel-size"
        )
    decoder = target.decoder("layer_skip")
    a_quarter = max(len(decoder.blocks) // 4, 1)
    return LayerSkip(
        decoder,
        target.backend,
        target.sampler,
        num_layers=options.integer("num_layers", a_quarter, low=1),
        vocab_size=target.vocab_size,
    )


class LayerSkip:
    """A Proposer: after `num_layers` layers come the final norm and the head.

    It needs no cache of its own. What these layers have computed of a sequence's tokens is the
    target's; what they compute of a draft's tokens is put where the target puts it again, with the
    same values, when it verifies them.
    """

    name = "layer_skip"
    capabilities = Capabilities(gives_probabilities=True, knows_confidence=True)
    kv_heads: Sequence[tuple[int, int]] = ()
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        target: CausalLM,
        backend: Backend,
        sampler: Sampler,
        *,
        num_layers: int,
        vocab_size: int,
    ) -> None:
        """vocab_size: of the tokenizer. Raises ConfigError for a number of layers that the target
        doesn't have.
        """
        if not 1 <= num_layers <= len(target.blocks):
            raise ConfigError(
                f"num_layers is {num_layers}, but the model has {len(target.blocks)} layers; use 1 "
                f"to {len(target.blocks)}, for example {max(len(target.blocks) // 4, 1)}"
            )
        self._num_layers = num_layers
        self._loop = DraftingLoop(
            target.first_blocks(num_layers), backend, sampler, vocab_size=vocab_size
        )

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._coverage = SharedCoverage(slots)
        self._loop.attach(slots, kv_layers[: self._num_layers])

    def begin(self, step: ScheduledStep) -> None:
        pass

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        pass

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        return self._loop.draft(tasks, self._coverage)

    def observe(self, step: ComputedStep) -> None:
        pass
