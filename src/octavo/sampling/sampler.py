"""The next token of each sequence, from a batch of logits and what each sequence asked for."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from octavo.core.step import SlotBinding, TokenLogprobs
from octavo.ops import Array, adjust_logits, non_finite_rows, sample, take_rows
from octavo.ops.backend import Backend
from octavo.sampling.edits import SequenceEdits, merge_edits
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.rng import uniforms

logger = logging.getLogger("octavo")

_NO_LOGPROBS = -2  # next to token_logprobs' ALL_TOKENS (-1) and counts from 0
_SEED_MASK = 2**64 - 1


def non_finite_error(slot: int, position: int) -> str:
    """The error of a sequence whose logits are broken; logged, since the model or dtype is at
    fault.
    """
    message = f"the model produced non-finite logits at position {position}"
    logger.warning("%s of the sequence in slot %d; it ends with an error", message, slot)
    return message


class SampledRows(NamedTuple):
    """token_ids (R,) int64. logprobs and errors by row: where asked for, and where sampling failed
    (the row's token id is then 0 and means nothing). refused: the rows that failed because of what
    their requests asked for.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]
    refused: frozenset[int]


class _Asked(NamedTuple):
    """What the sequences of a batch's rows ask for; for each of its R rows but where said.

    temperature, top_p, min_p (R,) float32, top_k (R,) int64. random_rows: those with a temperature,
    and their seeds. edits: (row, sequence) of those that change their logits. logprobs: (number of
    top tokens, rows) of those that want log-probabilities, so that one request for the whole
    vocabulary doesn't make the others pay.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    random_rows: np.ndarray
    seeds: np.ndarray
    edits: list[tuple[int, SequenceEdits]]
    logprobs: list[tuple[int, np.ndarray]]


class Sampler:
    """Holds what each slot's sequence asked for, and its penalties' counts.

    A row's token depends on its logits, its sequence's tokens, its seed and its position alone:
    not on the slot, the other rows, or how the sequence's steps were cut.
    """

    def __init__(self, backend: Backend, *, max_num_seqs: int, vocab_size: int) -> None:
        """vocab_size: V, of the tokenizer."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int64)
        self._edits: list[SequenceEdits | None] = [None] * max_num_seqs
        self._last: tuple[bytes, _Asked] | None = None  # of the last rows' slots

    def bind(self, binding: SlotBinding) -> None:
        """A sequence takes a slot."""
        slot, params = binding.slot, binding.sampling
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = binding.seed & _SEED_MASK
        self._num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        asked = SequenceEdits.are_asked_by(binding)
        self._edits[slot] = SequenceEdits(binding, self._vocab_size) if asked else None
        self._last = None

    def sample(self, logits: Array, slots: np.ndarray, positions: np.ndarray) -> SampledRows:
        """Choose one token per row. `logits` is used up: its memory may be written to.

        positions: of the tokens to be chosen. Log-probabilities are those of the logits as given,
        over the tokenizer's vocabulary: before penalties, biases, temperature and filters.
        Shapes: logits (R, V); slots, positions (R,) int64.
        """
        asked = self._asked_by(slots)
        broken = non_finite_rows(logits)
        errors = {
            row: non_finite_error(int(slots[row]), int(positions[row]))
            for row in broken.nonzero()[0].tolist()
        }
        edits = merge_edits(asked.edits, len(slots)) if asked.edits else None
        groups = self._rows_for_logprobs(logits, asked, copy=edits is not None)
        refused: list[int] = []
        if edits is not None:
            logits = adjust_logits(logits, edits)
            impossible = non_finite_rows(logits) & ~broken
            refused = np.flatnonzero(impossible).tolist()
            for row in refused:
                errors[row] = (
                    f"no token is possible at position {positions[row]}: allowed_token_ids, "
                    "bad_words and min_tokens forbid all, or a penalty is too large; relax them"
                )
            broken = broken | impossible
        token_ids = self._choose(logits, asked, positions, broken)
        for row, sequence in asked.edits:
            sequence.observe(int(token_ids[row]))
        logprobs: dict[int, TokenLogprobs] = {}
        for num_top, rows, rows_logits in groups:
            records = token_logprobs(rows_logits, token_ids[rows], num_top)
            logprobs.update(zip(rows.tolist(), records, strict=True))
        return SampledRows(token_ids, logprobs, errors, frozenset(refused))

    def _asked_by(self, slots: np.ndarray) -> _Asked:
        """Kept for the next step, which mostly has the same rows."""
        key = slots.tobytes()
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        temperature, num_logprobs = self._temperature[slots], self._num_logprobs[slots]
        random_rows = temperature.nonzero()[0]
        asked = _Asked(
            temperature,
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            random_rows,
            self._seed[slots[random_rows]],
            [
                (row, sequence)
                for row, slot in enumerate(slots.tolist())
                if (sequence := self._edits[slot]) is not None
            ],
            [
                (num_top, np.flatnonzero(num_logprobs == num_top))
                for num_top in np.unique(num_logprobs).tolist()
                if num_top != _NO_LOGPROBS
            ],
        )
        self._last = (key, asked)
        return asked

    def _choose(
        self, logits: Array, asked: _Asked, positions: np.ndarray, broken: np.ndarray
    ) -> np.ndarray:
        # A broken row's choice is thrown away; arg-max is defined for any logits.
        temperature = asked.temperature * ~broken
        uniform = np.zeros(len(positions))
        if len(rows := asked.random_rows):
            uniform[rows] = uniforms(asked.seeds, positions[rows].astype(np.uint64))
        token_ids: np.ndarray = sample(
            logits, temperature, asked.top_k, asked.top_p, asked.min_p, uniform
        )
        token_ids[broken] = 0
        return token_ids

    def _rows_for_logprobs(
        self, logits: Array, asked: _Asked, *, copy: bool
    ) -> list[tuple[int, np.ndarray, Array]]:
        """(number of top tokens, rows, their logits), for the rows that ask for any."""
        return [
            (num_top, rows, take_rows(logits, self._backend.from_host(rows)))
            if copy or len(rows) < logits.shape[0]
            else (num_top, rows, logits)
            for num_top, rows in asked.logprobs
        ]
