"""What sequences ask to change in their logits: penalties, biases, and tokens that may not come."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.core.step import SlotBinding
from octavo.ops.sampling import LogitEdits

# A float32 of zero or infinity would turn every logit that it touches into NaN or infinity.
_MIN_REPETITION = float(np.finfo(np.float32).tiny)
_MAX_REPETITION = float(np.finfo(np.float32).max)


class TokenCounts:
    """How often each token occurred in the output; 0 for tokens of the prompt alone.

    Flat arrays in order of first occurrence: adding a token is O(1), reading all is a copy.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._index = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self.tokens = array("q", self._index)
        self.counts = array("q", bytes(self.tokens.itemsize * len(self._index)))

    def add(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[index] += 1

    def after(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and counts as they would be with those of `path`; int64."""
        tokens, counts = np.array(self.tokens), np.array(self.counts)
        added: dict[int, int] = {}
        for token in path:
            if (index := self._index.get(token)) is None:
                added[token] = added.get(token, 0) + 1
            else:
                counts[index] += 1
        if not added:
            return tokens, counts
        return np.append(tokens, list(added)), np.append(counts, list(added.values()))


class BadWords:
    """Token sequences that the output may not contain."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self.single: list[int] = []
        # A word can only be completed right after its last but one token.
        self._by_previous: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        self._longest_prefix = 0
        for word in words:
            if len(word) == 1:
                self.single.append(word[0])
            else:
                self._by_previous[word[-2]].append((list(word[:-1]), word[-1]))
                self._longest_prefix = max(self._longest_prefix, len(word) - 1)

    def completions(self, output: list[int], path: Sequence[int] = ()) -> list[int]:
        """Tokens that would complete a word of several tokens after `output` and `path`."""
        if not self._by_previous:
            return []
        end = output[-self._longest_prefix :] + list(path) if path else output
        if not end:
            return []
        candidates = self._by_previous.get(end[-1], ())
        return [last for prefix, last in candidates if end[-len(prefix) :] == prefix]


class SequenceEdits:
    """One sequence's part of the edits, kept up to date token by token.

    path: guessed tokens that are to be taken for the next of the output; they leave no trace.
    """

    def __init__(self, binding: SlotBinding, vocab_size: int) -> None:
        """vocab_size: ids from there on can't be sampled anyway, so edits of them are dropped."""
        params = binding.sampling
        prompt = binding.token_ids[: binding.num_prompt_tokens]
        self.repetition = min(max(params.repetition_penalty, _MIN_REPETITION), _MAX_REPETITION)
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self._output: list[int] = []
        self._counts: TokenCounts | None = None
        if params.uses_output_history:
            # Presence and frequency look at the output alone: no entries for the prompt then.
            penalised = prompt if params.repetition_penalty != 1.0 else ()
            self._counts = TokenCounts(token for token in penalised if token < vocab_size)
        self._bad_words = BadWords(
            word for word in binding.bad_words_ids if word and word[-1] < vocab_size
        )
        biases = [(t, bias) for t, bias in params.logit_bias.items() if t < vocab_size]
        biases += [(token, -math.inf) for token in self._bad_words.single]
        self._biases = biases
        self._min_tokens = params.min_tokens
        self._eos = [token for token in binding.eos_token_ids if token < vocab_size]
        self.allowed: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            allowed = {token for token in params.allowed_token_ids if token < vocab_size}
            self.allowed = np.array(sorted(allowed), np.int64)
        for token in binding.token_ids[binding.num_prompt_tokens :]:
            self.observe(token)

    @staticmethod
    def are_asked_by(binding: SlotBinding) -> bool:
        """Whether the sequence ever changes its logits."""
        params = binding.sampling
        return bool(
            params.uses_output_history
            or params.logit_bias
            or params.allowed_token_ids is not None
            or binding.bad_words_ids
            or (params.min_tokens and binding.eos_token_ids)
        )

    def observe(self, token: int) -> None:
        """Take note of a generated token."""
        self._output.append(token)
        if self._counts is not None:
            self._counts.add(token)

    def penalties(self, path: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray] | None:
        """(tokens, counts) to penalise after `path`, or None."""
        return None if self._counts is None else self._counts.after(path)

    def biases(self, path: Sequence[int] = ()) -> list[tuple[int, float]]:
        """(token, bias) for the token after `path`; -inf forbids."""
        completions = self._bad_words.completions(self._output, path)
        biases = self._biases + [(token, -math.inf) for token in completions]
        if len(self._output) + len(path) < self._min_tokens:
            biases += [(token, -math.inf) for token in self._eos]
        return biases


def merge_edits(
    sequences: Sequence[tuple[int, SequenceEdits]],
    num_rows: int,
    paths: Sequence[Sequence[int]] | None = None,
) -> LogitEdits | None:
    """The edits of a batch of `num_rows` rows from those of (row, sequence); None if there are
    none. paths: by row, guessed tokens that come before it; None: there are none.
    """
    repetition = np.ones(num_rows, np.float32)
    presence = np.zeros(num_rows, np.float32)
    frequency = np.zeros(num_rows, np.float32)
    penalty_rows, penalty_tokens, penalty_counts = [], [], []
    bias_rows: list[int] = []
    biases: list[tuple[int, float]] = []
    allowed_rows, allowed_tokens = [], []
    for row, edits in sequences:
        path = paths[row] if paths is not None else ()
        if (penalties := edits.penalties(path)) is not None:
            repetition[row] = edits.repetition
            presence[row] = edits.presence
            frequency[row] = edits.frequency
            tokens, counts = penalties
            penalty_rows.append(np.full(len(tokens), row))
            penalty_tokens.append(tokens)
            penalty_counts.append(counts)
        if row_biases := edits.biases(path):
            bias_rows += [row] * len(row_biases)
            biases += row_biases
        if edits.allowed is not None:
            allowed_rows.append(row)
            allowed_tokens.append(edits.allowed)
    if not (penalty_rows or biases or allowed_rows):
        return None
    return LogitEdits(
        penalty_rows=_joined(penalty_rows),
        penalty_tokens=_joined(penalty_tokens),
        penalty_counts=_joined(penalty_counts),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        bias_rows=np.array(bias_rows, np.int64),
        bias_tokens=np.array([token for token, _ in biases], np.int64),
        bias_values=np.array([bias for _, bias in biases], np.float32),
        allowed_rows=np.array(allowed_rows, np.int64),
        allowed_pair_rows=np.repeat(
            np.array(allowed_rows, np.int64), [len(tokens) for tokens in allowed_tokens]
        ),
        allowed_pair_tokens=_joined(allowed_tokens),
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
