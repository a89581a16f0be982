"""Suffix decoding: what followed the longest known end of the text, in itself or in past outputs.

Source: SuffixDecoding, arXiv 2411.04975. It walks suffix trees with counts; here the occurrences
themselves are looked up, and vote.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledStep
from octavo.runner.speculation import ComputedStep
from octavo.speculative.history import History
from octavo.speculative.lookup import Guess, KnownText, LookupProposer
from octavo.speculative.registry import Options, Target, register

_NGRAM = 2  # a single token that occurred before says too little
_DEEPEST = 1024  # max_tree_depth that can be asked for
_SHARES = 4  # a vote's outcome is told apart by quarters, and unanimous


class PastOutputs:
    """Outputs of ended sequences, apart by cache salt.

    There are two generations of up to max_tokens / 2. When the younger one is full, the older one
    is forgotten: so nothing has to be taken out of a history.
    """

    def __init__(self, max_tokens: int) -> None:
        self._capacity = max_tokens // 2
        self._young: dict[str, History] = {}
        self._old: dict[str, History] = {}
        self._num_young = 0

    def add(self, cache_salt: str, token_ids: Sequence[int]) -> None:
        """Of an output longer than a generation, only the end is kept."""
        kept = token_ids[max(len(token_ids) - self._capacity, 0) :]
        if len(kept) <= _NGRAM:
            return  # nothing follows an n-gram in it
        if self._num_young + len(kept) > self._capacity:
            self._old, self._young, self._num_young = self._young, {}, 0
        self._num_young += len(kept)
        history = self._young.setdefault(cache_salt, History(_NGRAM))
        history.extend(kept)
        history.end_sequence()

    def histories(self, cache_salt: str) -> list[History]:
        """Younger first."""
        generations = (self._young, self._old)
        return [outputs[cache_salt] for outputs in generations if cache_salt in outputs]


class SuffixProposer(LookupProposer):
    """Guesses that a text goes on as it mostly did after its longest end that occurred before.

    A chain, because a tree of the same tokens had at most 2 % more accepted. The text's own past
    comes before that of others where both match as far.
    """

    name = "suffix"

    def __init__(self, *, max_tree_depth: int = 24, max_cached_tokens: int = 100_000) -> None:
        """max_tree_depth: tokens of context as far as longer ones are told apart, at least 2.
        max_cached_tokens: of past outputs, about 100 bytes each; 0 keeps none. Raises ConfigError.
        """
        if max_tree_depth < _NGRAM:
            raise ConfigError(f"max_tree_depth is {max_tree_depth}: give at least {_NGRAM}")
        if max_cached_tokens < 0:
            raise ConfigError(f"max_cached_tokens is {max_cached_tokens}: give 0 or more")
        self._depth = max_tree_depth
        self._past = PastOutputs(max_cached_tokens)
        lengths, shares = range(max_tree_depth + 1), range(_SHARES + 1)
        super().__init__(
            _NGRAM, (n / (n + 2) * max(share, 1) / _SHARES for share in shares for n in lengths)
        )

    def begin(self, step: ScheduledStep) -> None:
        for binding in step.bindings:
            if (text := self._texts.get(binding.slot)) is not None:
                self._past.add(text.cache_salt, text.history.token_ids[text.first_own :])
        super().begin(step)

    def observe(self, step: ComputedStep) -> None:
        """Read what was generated: a slot that is bound anew has lost it."""
        for sequence in step.step.sequences:
            if sequence.samples:
                self._texts[sequence.slot].read(self._slots, sequence.slot)

    def guess(self, text: KnownText, length: int) -> Guess:
        context, best, source = text.history.token_ids, None, text.history
        for history in (text.history, *self._past.histories(text.cache_salt)):
            match = history.find(context, self._depth)
            if match is not None and (best is None or match.length > best.length):
                best, source = match, history
        if best is None:
            return Guess((), ())
        return self._vote(
            [source.following(position, length) for position in best.positions], best.length
        )

    def _vote(self, candidates: list[array[int]], match_length: int) -> Guess:
        """The candidates agree on what comes next, token by token; who doesn't is out.

        candidates: latest first, which decides a tie.
        """
        token_ids: list[int] = []
        signs: list[int] = []
        while candidates := [c for c in candidates if len(c) > len(token_ids)]:
            place, first = len(token_ids), candidates[0]
            if all(candidate == first for candidate in candidates):
                token_ids.extend(first[place:])
                signs += [self._sign(_SHARES, match_length + i) for i in range(place, len(first))]
                break
            votes = [candidate[place] for candidate in candidates]
            winner = max(votes, key=votes.count)
            share = votes.count(winner) * _SHARES // len(votes)
            token_ids.append(winner)
            signs.append(self._sign(share, match_length + place))
            candidates = [c for c in candidates if c[place] == winner]
        return Guess(token_ids, signs)

    def _sign(self, share: int, match_length: int) -> int:
        return share * (self._depth + 1) + min(match_length, self._depth)


@register("suffix")
def build(options: Options, target: Target) -> SuffixProposer:
    return SuffixProposer(
        max_tree_depth=options.integer(
            "suffix_decoding_max_tree_depth", 24, low=_NGRAM, high=_DEEPEST
        ),
        max_cached_tokens=options.integer("suffix_decoding_max_cached_tokens", 100_000, low=0),
    )
