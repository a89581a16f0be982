"""Words of one token each, found through a tokenizer or through counts alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.core.errors import ConfigError
from octavo.text.served_model import ServedModel


def any_words(vocabulary: Vocabulary, seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    first = rng.choice(vocabulary.starts)
    return [first, *rng.choices(range(len(vocabulary.words)), k=length - 1)]


def test_a_text_of_n_words_is_n_tokens_and_those_ids(model: ServedModel) -> None:
    vocabulary = Vocabulary.learn(model.tokenizer.encode)
    for seed in range(20):
        positions = any_words(vocabulary, seed, 1 + seed * 3)
        encoded = model.tokenizer.encode(vocabulary.text(positions))
        assert len(encoded) == vocabulary.num_special + len(positions)
        assert vocabulary.token_ids(positions) == tuple(encoded)


def test_what_the_tokenizer_adds_is_known(model: ServedModel) -> None:
    vocabulary = Vocabulary.learn(model.tokenizer.encode)
    bos = tuple(model.tokenizer.encode(""))
    assert vocabulary.num_special == len(bos)
    assert vocabulary.special_ids == (bos, ())


def test_an_end_that_the_tokenizer_adds_is_told_from_a_beginning() -> None:
    def encode(text: str) -> list[int]:
        return [7, *(100 + ord(letter) for letter in text), 9]

    vocabulary = Vocabulary.learn(encode)
    assert vocabulary.special_ids == ((7,), (9,))
    positions = any_words(vocabulary, 0, 5)
    assert vocabulary.token_ids(positions) == tuple(encode(vocabulary.text(positions)))


def test_counts_alone_find_words_too(model: ServedModel) -> None:
    learned = Vocabulary.learn(model.tokenizer.encode)
    counted = Vocabulary.learn_by_counts(lambda text: len(model.tokenizer.encode(text)))
    assert set(counted.words) <= set(learned.words)
    assert set(counted.starts) <= set(learned.starts)
    assert counted.num_special == learned.num_special
    with pytest.raises(ConfigError, match="send text"):
        counted.token_ids([0])


def test_counts_are_asked_for_sparingly() -> None:
    """Each is a request that runs the model."""
    calls = 0

    def count(text: str) -> int:
        nonlocal calls
        calls += 1
        return sum(1 + (len(word) > 6) for word in text.split(" "))

    assert len(Vocabulary.learn_by_counts(count).words) > 50
    assert calls < 40


def test_running_words_are_english_in_its_order(vocabulary: Vocabulary) -> None:
    text = vocabulary.text(vocabulary.running[:12])
    assert "the" in text.split()
    assert set(vocabulary.running) <= set(range(len(vocabulary.words)))


def test_a_tokenizer_that_joins_words_is_refused() -> None:
    def pairs(text: str) -> Sequence[int]:
        """Two characters are one token, wherever they stand."""
        return range((len(text) + 1) // 2)

    with pytest.raises(ConfigError, match="--tokenizer"):
        Vocabulary.learn(pairs)


def test_a_real_vocabulary_costs_few_calls() -> None:
    """Nearly all of the words are one token: groups of 32 are tried, not words."""
    calls = 0

    def encode(text: str) -> list[int]:
        nonlocal calls
        calls += 1
        return [hash(word) for word in text.split(" ")]

    vocabulary = Vocabulary.learn(encode)
    assert len(vocabulary.words) > 300
    assert calls < 150
