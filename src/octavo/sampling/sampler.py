"""The next token of each sequence, from a batch of logits and what each sequence asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from octavo.core.step import SlotBinding, TokenLogprobs
from octavo.ops import (
    Array,
    adjust_logits,
    log_probabilities,
    non_finite_rows,
    probabilities,
    sample,
    split_columns,
    take_rows,
)
from octavo.ops.backend import Backend
from octavo.sampling.edits import SequenceEdits, merge_edits
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.rejection import accept_or_resample, draw
from octavo.sampling.rng import uniforms

logger = logging.getLogger("octavo")

_NO_LOGPROBS = -2  # next to token_logprobs' ALL_TOKENS (-1) and counts from 0
_SEED_MASK = 2**64 - 1

# What the random numbers of one position are for. Stream 3 + d is for drawing a guess that has d
# guesses before it: a position is guessed again in a later step if one before it was rejected, with
# other numbers, so that nothing that the first guess led to says anything about the second.
_TOKEN, _ACCEPTANCE, _RESAMPLING, _DRAFT = range(4)


def non_finite_error(slot: int, position: int, *, is_known: bool = True) -> str:
    """The error of a sequence whose logits are broken; logged, since the model or dtype is at
    fault. is_known: the position follows a token of the sequence, and not only guessed ones.
    """
    message = f"the model produced non-finite logits at position {position}"
    if is_known:
        logger.warning("%s of the sequence in slot %d; it ends with an error", message, slot)
    return message


class DrawnRows(NamedTuple):
    """Rows (D,) int64 whose next guess was drawn at random. token_ids (D,) int64: the guesses.
    probabilities (D, V) float32: the distributions that they were drawn from.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    probabilities: np.ndarray


class SampledRows(NamedTuple):
    """token_ids (R,) int64. logprobs and errors by row: where asked for, and where sampling failed
    (the row's token id is then 0 and means nothing). refused: the rows that failed because of what
    their requests asked for.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]
    refused: frozenset[int]


class DraftedRows(NamedTuple):
    """Guesses by a model that makes logits. token_ids (R,) int64. confidences (R,) float32: the
    probability that the row's likeliest token has where the guess came from; it does not depend on
    which token was drawn. probabilities: for rows that were drawn, the distribution (V,) float32.
    """

    token_ids: np.ndarray
    confidences: np.ndarray
    probabilities: dict[int, np.ndarray]


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
    not on the slot, the other rows, or how the sequence's steps were cut. Where its next guess was
    drawn, it depends on this guess and its distribution, too.
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
        self._draws = np.zeros(max_num_seqs, np.bool_)
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int64)
        self._edits: list[SequenceEdits | None] = [None] * max_num_seqs
        self.edited_slots: set[int] = set()
        """Those whose sequences change their logits, and so must `observe` their tokens."""
        self._last: tuple[bytes, _Asked] | None = None  # of the last rows' slots
        self._take_rows = backend.compile(_rows_of)

    def bind(self, binding: SlotBinding) -> None:
        """A sequence takes a slot."""
        slot, params = binding.slot, binding.sampling
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = binding.seed & _SEED_MASK
        is_random = params.temperature > 0.0 and params.top_k != 1
        self._draws[slot] = is_random and params.seed is None
        self._num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        asked = SequenceEdits.are_asked_by(binding)
        self._edits[slot] = SequenceEdits(binding, self._vocab_size) if asked else None
        (self.edited_slots.add if asked else self.edited_slots.discard)(slot)
        self._last = None

    def observe(self, slot: int, token_ids: Iterable[int]) -> None:
        """Tokens were appended to the slot's sequence: what follows must know them."""
        if (edits := self._edits[slot]) is not None:
            for token in token_ids:
                edits.observe(token)

    def draws(self, slots: np.ndarray) -> np.ndarray:
        """Whether guesses for the slots' sequences may be drawn at random: those that are sampled,
        and not by a seed of the user's, whose tokens must not depend on guesses. Shapes: (R,) int64
        -> (R,) bool.
        """
        result: np.ndarray = self._draws[slots]
        return result

    def draft(
        self, logits: Array, slots: np.ndarray, positions: np.ndarray, *, depth: int
    ) -> DraftedRows:
        """Guess one token per row by a draft's logits, as they are: without penalties and biases.

        Rows that may draw do so from the distribution that the request's temperature, top_k, top_p
        and min_p make of the logits; the others take the likeliest token. positions: of the
        guesses. depth: how many guesses there are between the last known token and these.
        Shapes: logits (R, W), of which columns from V on are left out, and if W is less, the
        missing tokens are never guessed; slots, positions (R,) int64.
        """
        width = logits.shape[1]
        if width > self._vocab_size:
            logits = split_columns(logits, (self._vocab_size, width - self._vocab_size))[0]
        drawn = np.flatnonzero(self._draws[slots])
        if len(drawn) < len(slots):
            token_ids, confidences = _likeliest(logits)
        else:
            token_ids = np.empty(len(slots), np.int64)
            confidences = np.empty(len(slots), np.float32)
        if not len(drawn):
            return DraftedRows(token_ids, confidences, {})
        if len(drawn) < len(slots):
            logits = self._take_rows(logits, self._backend.from_host(drawn))
        of = slots[drawn]
        q = probabilities(
            logits, self._temperature[of], self._top_k[of], self._top_p[of], self._min_p[of]
        )
        if (missing := self._vocab_size - q.shape[1]) > 0:
            q = np.pad(q, ((0, 0), (0, missing)))
        numbers = uniforms(
            self._seed[of], positions[drawn].astype(np.uint64), stream=_DRAFT + depth
        )
        token_ids[drawn] = draw(q, numbers)
        confidences[drawn] = q.max(axis=1)
        return DraftedRows(token_ids, confidences, dict(zip(drawn.tolist(), q, strict=True)))

    def sample(
        self,
        logits: Array,
        slots: np.ndarray,
        positions: np.ndarray,
        *,
        paths: Sequence[Sequence[int]] | None = None,
        drawn: DrawnRows | None = None,
    ) -> SampledRows:
        """Choose one token per row. `logits` is used up: its memory may be written to.

        Several rows may be of one slot. paths: by row, the guessed tokens between the slot's last
        known one and the token to be chosen; None: there are none. positions: of the tokens to be
        chosen. drawn: these rows' tokens are their guesses where those are accepted, see
        `accept_or_resample`. Log-probabilities are those of the logits as given, over the
        tokenizer's vocabulary: before penalties, biases, temperature and filters.
        Shapes: logits (R, V); slots, positions (R,) int64.
        """
        asked = self._asked_by(slots)
        broken = non_finite_rows(logits)
        errors = {
            # Behind guesses it is no news yet: if they are accepted, the next step comes to it.
            row: non_finite_error(
                int(slots[row]), int(positions[row]), is_known=not (paths and paths[row])
            )
            for row in broken.nonzero()[0].tolist()
        }
        edits = merge_edits(asked.edits, len(slots), paths) if asked.edits else None
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
        is_settled = broken.copy()
        if drawn is not None:
            is_settled[drawn.rows] = True
        token_ids = self._choose(logits, asked, positions, is_settled)
        if drawn is not None:
            token_ids[drawn.rows] = self._accept_or_resample(
                logits, asked, slots, positions, broken, drawn
            )
        token_ids[broken] = 0
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
        self, logits: Array, asked: _Asked, positions: np.ndarray, is_settled: np.ndarray
    ) -> np.ndarray:
        # The others' choice is thrown away; arg-max is quick, and defined for any logits.
        temperature = asked.temperature * ~is_settled
        uniform = np.zeros(len(positions))
        if len(rows := asked.random_rows):
            uniform[rows] = uniforms(asked.seeds, positions[rows].astype(np.uint64), _TOKEN)
        token_ids: np.ndarray = sample(
            logits, temperature, asked.top_k, asked.top_p, asked.min_p, uniform
        )
        return token_ids

    def _accept_or_resample(
        self,
        logits: Array,
        asked: _Asked,
        slots: np.ndarray,
        positions: np.ndarray,
        broken: np.ndarray,
        drawn: DrawnRows,
    ) -> np.ndarray:
        rows = drawn.rows
        p = probabilities(
            self._take_rows(logits, self._backend.from_host(rows)),
            asked.temperature[rows] * ~broken[rows],
            asked.top_k[rows],
            asked.top_p[rows],
            asked.min_p[rows],
        )
        seeds, counters = self._seed[slots[rows]], positions[rows].astype(np.uint64)
        acceptance, resampling = (
            uniforms(seeds, counters, stream) for stream in (_ACCEPTANCE, _RESAMPLING)
        )
        return accept_or_resample(p, drawn.probabilities, drawn.token_ids, acceptance, resampling)

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


def _rows_of(logits: Array, rows: Array) -> Array:
    return take_rows(logits, rows)


def _likeliest(logits: Array) -> tuple[np.ndarray, np.ndarray]:
    """Each row's arg-max and its probability; 0 where the row is broken."""
    num_rows = logits.shape[0]
    zeros = np.zeros(num_rows, np.float32)
    token_ids = sample(
        logits, zeros, np.zeros(num_rows, np.int64), zeros, zeros, zeros.astype(np.float64)
    )
    logprobs = log_probabilities(logits, token_ids, 0)[0]
    return token_ids, np.nan_to_num(np.exp(logprobs))
