"""A second, smaller model with the same vocabulary guesses. Source: arXiv 2211.17192, section 2."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledStep
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import load_weights, make_rope_tables, plan_weights
from octavo.models.registry import build_model
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.sampling.sampler import Sampler
from octavo.speculative.coverage import BlockCoverage
from octavo.speculative.drafting_loop import DraftingLoop
from octavo.speculative.proposer import Capabilities, DraftTask
from octavo.speculative.registry import Options, Target, register


@register("draft_model")
def build(options: Options, target: Target) -> DraftModel:
    """The model named by `model`, in the formats that the target's weights have."""
    checkpoint = target.open_model(options.required_text("model", "the model that drafts"))
    model, backend = build_model(checkpoint.config), target.backend
    proposer = DraftModel(model, backend, target.sampler, vocab_size=target.vocab_size)
    load_weights(model, plan_weights(model, checkpoint, backend, target.dtype, target.quantization))
    checkpoint.release_pages()
    return proposer


class DraftModel:
    """A Proposer. The model's keys and values are in further layers of the target's blocks; what it
    has not computed of a sequence when it is asked, it computes first.
    """

    name = "draft_model"
    capabilities = Capabilities(gives_probabilities=True, knows_confidence=True)
    taps: tuple[int, ...] = ()

    def __init__(
        self, model: CausalLM, backend: Backend, sampler: Sampler, *, vocab_size: int
    ) -> None:
        """model: its weights are loaded before it drafts. vocab_size: of the target's tokenizer,
        which must be the model's too.

        Raises ConfigError if the model has no row for some of its ids.
        """
        rows = model.spec.vocab_size
        if rows < vocab_size:
            raise ConfigError(
                f"the draft model ({model.family}) has embeddings of {rows} tokens, but the "
                f"target's vocabulary has {vocab_size}; draft with a model of the same vocabulary"
            )
        self.kv_heads = model.spec.kv_shapes
        self._model = model
        self._backend = backend
        self._loop = DraftingLoop(model, backend, sampler, vocab_size=vocab_size)
        self._num_fed: dict[int, int] = {}  # by slot: draft tokens that it computed in this step

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._coverage = BlockCoverage(slots)
        num_positions = min(self._model.max_position, slots.token_ids.shape[1])
        make_rope_tables(self._model, self._backend, num_positions)
        self._loop.attach(slots, kv_layers[len(kv_layers) - len(self.kv_heads) :])

    def begin(self, step: ScheduledStep) -> None:
        self._num_fed.clear()
        self._coverage.begin(step)

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        self._loop.catch_up(tasks, self._coverage)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        drafts = self._loop.draft(tasks, self._coverage)
        for task, draft in zip(tasks, drafts, strict=True):
            if draft is not None:
                # It reads the last one only if it then was not sure enough of another.
                self._num_fed[task.slot] = len(draft.token_ids) - 1
        return drafts

    def observe(self, step: ComputedStep) -> None:
        """Draft tokens that were accepted are known now, and computed."""
        for sequence, kept in zip(step.step.sequences, step.kept(), strict=True):
            if num_fed := self._num_fed.get(sequence.slot):
                known, accepted = sequence.start + sequence.num_tokens, len(kept) - 1
                self._coverage.fill(sequence.slot, known + min(accepted, num_fed))
