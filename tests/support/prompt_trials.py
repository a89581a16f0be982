"""Many sequences that follow one prompt, each with a random stream of its own: how often what
comes, and how often it should.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from octavo.core.model_spec import KVFormat
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import (
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
)
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.runner.model_runner import ModelRunner
from octavo.sampling.sampler import Sampler
from octavo.speculative.proposer import Proposer
from octavo.speculative.proposers import Proposers
from support.distributions import check_counts, expected_distribution
from support.forward import Forward

BLOCK_SIZE, LENGTH = 4, 3
NUM_TOKENS = 3
"""That each sequence generates; all guessed for."""

_SLOTS = 1024


class PromptTrials:
    """vocab_size: V, small; what the model's logits have beyond it is cut off. prompt: whole blocks
    and one token more, so that the blocks are computed once, and shared.
    """

    def __init__(
        self,
        backend: Backend,
        model: CausalLM,
        build_proposer: Callable[[Sampler], Proposer],
        *,
        prompt: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._model, self._backend = model, backend
        self._prompt, self._vocab_size = tuple(prompt), vocab_size
        self._num_shared = (len(prompt) - 1) // BLOCK_SIZE
        self._num_own = -(-(1 + NUM_TOKENS + LENGTH) // BLOCK_SIZE)
        sampler = Sampler(backend, max_num_seqs=_SLOTS, vocab_size=vocab_size)
        self._runner = ModelRunner(
            model,
            backend,
            sampler,
            num_blocks=self._num_shared + _SLOTS * self._num_own,
            block_size=BLOCK_SIZE,
            kv_format=KVFormat("float32"),
            max_num_seqs=_SLOTS,
            max_model_len=BLOCK_SIZE * (self._num_shared + self._num_own),
            vocab_size=vocab_size,
            speculation=Proposers([build_proposer(sampler)]),
        )
        self._num_steps = 0
        self.num_drafts = 0
        self._shared = tuple(range(self._num_shared))
        binding = SlotBinding(0, self._prompt, len(prompt), SamplingParams(), 0, frozenset(), ())
        prefix = ScheduledSequence(0, 0, len(prompt) - 1, self._shared, samples=False)
        self._execute([binding], [prefix])

    def generate(self, params: Sequence[SamplingParams], num_sequences: int) -> np.ndarray:
        """Sequence i goes by params[i % len(params)]. Shapes: -> (num_sequences, NUM_TOKENS)."""
        found = []
        for first in range(0, num_sequences, _SLOTS):
            bindings = [
                SlotBinding(
                    number - first,
                    self._prompt,
                    len(self._prompt),
                    params[number % len(params)],
                    number,
                    frozenset(),
                    (),
                )
                for number in range(first, min(first + _SLOTS, num_sequences))
            ]
            found += self._decode(bindings)
        return np.array(found)

    def _decode(self, bindings: list[SlotBinding]) -> list[list[int]]:
        generated: list[list[int]] = [[] for _ in bindings]
        growing = list(range(len(bindings)))
        while growing:
            sequences = []
            for slot in growing:
                blocks: tuple[int, ...] = ()
                if bindings:
                    first = self._num_shared + slot * self._num_own
                    blocks = (*self._shared, *range(first, first + self._num_own))
                start = len(self._prompt) - 1 + len(generated[slot])
                # Some stop early where they are unsure.
                request = DraftRequest(0, LENGTH, 0.2 * (slot % 3))
                sequences.append(ScheduledSequence(slot, start, 1, blocks, True, request))
            for output in self._execute(bindings, sequences):
                generated[output.slot] += output.token_ids
                self.num_drafts += output.num_drafts
            bindings = []
            growing = [slot for slot in growing if len(generated[slot]) < NUM_TOKENS]
        return [tokens[:NUM_TOKENS] for tokens in generated]

    def _execute(
        self, bindings: list[SlotBinding], sequences: list[ScheduledSequence]
    ) -> list[SequenceOutput]:
        self._num_steps += 1
        step = ScheduledStep(self._num_steps, bindings, sequences, [], len(sequences))
        return self._runner.execute(step).sequences

    def check(self, generated: np.ndarray, params: Sequence[SamplingParams]) -> None:
        """Chi-square tests of the tokens together, for each of the settings."""
        logits = self._logits_after_all()
        size = self._vocab_size
        for number, one in enumerate(params):
            p = [np.stack([_distribution(row, one) for row in rows]) for rows in logits]
            joint = p[0]
            for further in p[1:]:  # (V ** tokens, V): every row of it follows one outcome so far
                joint = joint.reshape(-1, 1) * further
            mine = generated[number :: len(params)]
            outcomes = np.ravel_multi_index(tuple(mine.T), (size,) * NUM_TOKENS)
            counts = np.bincount(outcomes, minlength=size**NUM_TOKENS)
            check_counts(counts[None], joint.reshape(1, -1))

    def _logits_after_all(self) -> list[np.ndarray]:
        """After the prompt and 0, 1, ... tokens, whichever: (V ** tokens, V) each."""
        forward = Forward(self._model, self._backend)
        found = []
        for count in range(NUM_TOKENS):
            rows = [
                forward.prompt([*self._prompt, *tokens])[-1, : self._vocab_size]
                for tokens in np.ndindex((self._vocab_size,) * count)
            ]
            found.append(np.stack(rows).astype(np.float64))
        return found


def _distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    edited = logits.copy()
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    return expected_distribution(
        edited, params.temperature, params.top_k, params.top_p, params.min_p
    )
