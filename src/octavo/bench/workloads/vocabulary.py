"""Words of which a tokenizer makes one token each, so that a prompt's length is known."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from octavo.core.errors import ConfigError

Encode = Callable[[str], Sequence[int]]
"""A prompt's text -> its token ids, with what the tokenizer adds around them."""
Count = Callable[[str], int]
"""A prompt's text -> how many tokens it is, with what the tokenizer adds."""

_GROUP = 32
_LEAST_WORDS = 8
_CHECKS = ((0, 3), (1, 40), (2, 160))  # seed, words


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Words that are one token each, whatever words of it stand around them.

    A prompt is told by the positions of its words in `words`. starts: positions of those that are
    one token at the beginning of a text, too. running: positions, as the words follow each other in
    an English text. separator: between words. num_special: tokens that the tokenizer adds to a text
    (BOS). chat_overhead: what a chat template adds to one user message, where it was measured.

    ids: of the words inside a text; start_ids: at its beginning, by position; special_ids: what
    comes before and after the text. ids is None where only numbers of tokens are known.
    """

    words: tuple[str, ...]
    starts: tuple[int, ...]
    running: tuple[int, ...]
    separator: str
    num_special: int
    ids: tuple[int, ...] | None = None
    start_ids: Mapping[int, int] | None = None
    special_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    chat_overhead: int = 0

    @classmethod
    def learn(cls, encode: Encode) -> Vocabulary:
        """From a tokenizer. Raises ConfigError if it has no such words."""
        found = _learn(lambda text: len(encode(text)), most_words=None, most_starts=64)
        first = found.words[found.starts[0]]
        every = [first, *found.words]
        joined = list(encode(found.separator.join(every)))
        ends = [list(encode(found.separator.join((first, word)))) for word in found.words[:2]]
        num_after = 0
        while num_after < found.num_special and ends[0][-1 - num_after] == ends[1][-1 - num_after]:
            num_after += 1
        num_before = found.num_special - num_after
        inside = joined[num_before + 1 : num_before + len(every)]
        return cls(
            words=found.words,
            starts=found.starts,
            running=found.running,
            separator=found.separator,
            num_special=found.num_special,
            ids=tuple(inside),
            start_ids={p: encode(found.words[p])[num_before] for p in found.starts},
            special_ids=(tuple(joined[:num_before]), tuple(joined[num_before + len(every) :])),
        )

    @classmethod
    def learn_by_counts(cls, count: Count) -> Vocabulary:
        """From numbers of tokens alone, such as the usage that a server reports: each costs a
        request that runs the model, so that few words are tried unless these don't do.
        """
        return _learn(count, most_words=64, most_starts=4)

    def text(self, positions: Sequence[int]) -> str:
        words = self.words
        return self.separator.join([words[p] for p in positions])

    def token_ids(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Those of `text`, with what the tokenizer adds around them."""
        if self.ids is None or self.start_ids is None:
            raise ConfigError("only the numbers of this tokenizer's tokens are known; send text")
        ids = self.ids
        before, after = self.special_ids
        first = [self.start_ids[p] for p in positions[:1]]
        return (*before, *first, *[ids[p] for p in positions[1:]], *after)


@cache
def _english() -> list[str]:
    """The words of words.txt, in lower case: the beginning of Alice's Adventures in Wonderland
    (L. Carroll, 1865) and the Gettysburg Address (A. Lincoln, 1863).
    """
    text = resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8")
    return re.findall(r"[a-z]+", text.lower())


def _learn(count: Count, *, most_words: int | None, most_starts: int) -> Vocabulary:
    """A vocabulary without ids: of the most frequent words, or of all, or with letters, or of
    letters alone.
    """
    text = _english()
    with_letters = text + list(string.ascii_lowercase)
    attempts: list[tuple[str, list[str], int | None]] = []
    if most_words is not None:
        attempts.append((" ", text, most_words))
    attempts += [(" ", text, None), (" ", with_letters, None), ("", list("".join(text)), None)]
    for separator, running, most in attempts:
        words = [word for word, _ in Counter(running).most_common(most)]
        found = _single_tokens(count, separator, words, running, most_starts)
        if found is not None and _adds_up(count, found):
            return found
    raise ConfigError(
        f"the tokenizer has fewer than {_LEAST_WORDS} English words or letters that stay one token "
        "each next to each other, so that prompts of an exact length can't be written with it; "
        "name the model's tokenizer with --tokenizer, or use a workload with its own prompts"
    )


def _single_tokens(
    count: Count, separator: str, words: list[str], running: Sequence[str], most_starts: int
) -> Vocabulary | None:
    """Those of `words` that are one token each, if there are enough.

    A word is at least one token, so n words that add n tokens are one each: they are tried in
    groups, and a group that is longer is halved.
    """
    anchor = words[0]
    alone = count(anchor)

    def of_one_token(group: list[str]) -> list[str]:
        if count(separator.join([anchor, *group])) - alone == len(group):
            return group
        if len(group) == 1:
            return []
        half = len(group) // 2
        return of_one_token(group[:half]) + of_one_token(group[half:])

    groups = [words[i : i + _GROUP] for i in range(0, len(words), _GROUP)]
    kept = [word for group in groups for word in of_one_token(group)]
    if len(kept) < _LEAST_WORDS:
        return None
    lengths = [count(word) for word in kept[:most_starts]]
    shortest = min(lengths)  # one token, and what the tokenizer adds
    where = {word: position for position, word in enumerate(kept)}
    return Vocabulary(
        words=tuple(kept),
        starts=tuple(position for position, n in enumerate(lengths) if n == shortest),
        running=tuple(where[word] for word in running if word in where),
        separator=separator,
        num_special=shortest - 1,
    )


def _adds_up(count: Count, found: Vocabulary) -> bool:
    """Whether words in any order are as many tokens as words."""
    for seed, length in _CHECKS:
        rng = random.Random(seed)
        positions = [rng.choice(found.starts), *rng.choices(range(len(found.words)), k=length - 1)]
        if count(found.text(positions)) != found.num_special + length:
            return False
    return True
