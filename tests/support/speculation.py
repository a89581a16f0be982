"""Speculative decoding without a model: the target's logits come from a table, by the last token.

So the tokens are a Markov chain whose probabilities are known exactly, whatever guesses, and
however well. `generate` does what a runner does from one proposal to the next: rows for the
guesses, one call of the sampler, verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SlotBinding
from octavo.ops.backend import Backend
from octavo.runner.slots import Slots
from octavo.runner.speculation import Draft, Verified
from octavo.sampling.sampler import DrawnRows, SampledRows, Sampler
from octavo.speculative.verify import verify
from support.distributions import check_counts, expected_distribution

Propose = Callable[[Slots, Sampler, np.ndarray], Sequence[Draft | None]]
"""Guesses for the sequences in these slots (S,) int64."""

Verify = Callable[[Draft, SampledRows, int], Verified]

_NO_DRAFT = Draft(np.zeros(0, np.int64))


def generate(
    backend: Backend,
    table: np.ndarray,
    propose: Propose,
    *,
    num_sequences: int = 2048,
    num_tokens: int = 100,
    verifier: Verify = verify,
    params: SamplingParams | None = None,
    **binding: Any,
) -> np.ndarray:
    """Sequences of one prompt token and `num_tokens` more, decoded together, each with a random
    stream of its own. table (V, V): logits by the last token. binding: other fields of the
    sequences' SlotBinding. Shapes: -> (num_sequences, 1 + num_tokens).
    """
    vocab_size = len(table)
    logits_of = table.astype(np.float32)
    slots = Slots(num_sequences, num_tokens + 64, block_size=16)
    sampler = Sampler(backend, max_num_seqs=num_sequences, vocab_size=vocab_size)
    params = params or SamplingParams()
    for slot in range(num_sequences):
        plain = SlotBinding(slot, (slot % vocab_size,), 1, params, slot, frozenset(), ())
        bound = plain._replace(**binding)
        slots.bind(bound)
        sampler.bind(bound)
    while len(active := np.flatnonzero(slots.lengths <= num_tokens)):
        drafts = [draft or _NO_DRAFT for draft in propose(slots, sampler, active)]
        sampled, first_rows = _sample(backend, logits_of, slots, sampler, active, drafts)
        assert not sampled.errors
        starts = slots.lengths[active].tolist()
        ends = []
        for slot, start, draft, row in zip(
            active.tolist(), starts, drafts, first_rows, strict=True
        ):
            token_ids = verifier(draft, sampled, row).token_ids
            ends.append(start + len(token_ids))
            slots.token_ids[slot, start : ends[-1]] = token_ids
            sampler.observe(slot, token_ids)
        slots.lengths[active] = ends
    return slots.token_ids[:, : 1 + num_tokens]


def _sample(
    backend: Backend,
    logits_of: np.ndarray,
    slots: Slots,
    sampler: Sampler,
    active: np.ndarray,
    drafts: Sequence[Draft],
) -> tuple[SampledRows, list[int]]:
    """The rows of all drafts, sampled; and each draft's first one."""
    lengths = slots.lengths[active]
    paths = [path for draft in drafts for path in draft.paths()]
    counts = np.array([1 + len(draft.token_ids) for draft in drafts])
    ends = counts.cumsum()
    first_rows = ends - counts
    last_tokens = np.empty(ends[-1], np.int64)
    is_first = np.zeros(ends[-1], bool)
    is_first[first_rows] = True
    last_tokens[is_first] = slots.token_ids[active, lengths - 1]
    last_tokens[~is_first] = np.concatenate([draft.token_ids for draft in drafts])
    drawn = [(draft, row) for draft, row in zip(drafts, first_rows.tolist(), strict=True)]
    drawn = [(draft, row) for draft, row in drawn if draft.probabilities is not None]
    drawn_rows = None
    if drawn:
        drawn_rows = DrawnRows(
            rows=np.concatenate([row + np.arange(len(draft.token_ids)) for draft, row in drawn]),
            token_ids=np.concatenate([draft.token_ids for draft, _ in drawn]),
            probabilities=np.concatenate([draft.probabilities for draft, _ in drawn]),
        )
    sampled = sampler.sample(
        backend.from_host(logits_of[last_tokens]),
        active.repeat(counts),
        lengths.repeat(counts) + [len(path) for path in paths],
        paths=paths,
        drawn=drawn_rows,
    )
    return sampled, first_rows.tolist()


def check_tokens(
    sequences: np.ndarray, table: np.ndarray, params: SamplingParams | None = None
) -> None:
    """Chi-square tests of what `generate` gave: each token after the one before it, and pairs of
    tokens after the one before them.
    """
    params = params or SamplingParams()
    size = len(table)
    logits = table.copy()
    for token, bias in params.logit_bias.items():
        logits[:, token] += bias
    p = np.stack(
        [
            expected_distribution(row, params.temperature, params.top_k, params.top_p, params.min_p)
            for row in logits
        ]
    )
    before, after = sequences[:, :-1].ravel(), sequences[:, 1:].ravel()
    check_counts(np.bincount(before * size + after, minlength=size**2).reshape(size, size), p)
    even = (sequences.shape[1] - 1) // 2 * 2  # pairs must not overlap to be independent
    first, second, third = (sequences[:, i : even + i : 2].ravel() for i in range(3))
    triples = (first * size + second) * size + third
    joint = p[:, :, np.newaxis] * p[np.newaxis, :, :]
    counts = np.bincount(triples, minlength=size**3).reshape(size, size**2)
    check_counts(counts, joint.reshape(size, size**2))
