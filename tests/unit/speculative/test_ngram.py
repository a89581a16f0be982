from __future__ import annotations

from typing import cast

import pytest

from octavo.core.errors import ConfigError
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.registry import Target, build_proposers
from support.lookup import LookupBench


def bench(minimum: int = 2, maximum: int = 16) -> LookupBench:
    return LookupBench(NgramProposer(prompt_lookup_min=minimum, prompt_lookup_max=maximum))


def test_what_followed_the_last_tokens_in_the_prompt_is_guessed() -> None:
    b = bench()
    b.bind([1, 2, 3, 4, 5, 9, 2, 3])
    assert b.draft(3) == [4, 5, 9]
    assert b.draft(1) == [4]


def test_what_followed_them_in_the_output_is_guessed() -> None:
    b = bench()
    b.bind([1, 2, 3])
    assert b.draft(3) == []
    b.generate([7, 8, 2, 3])
    assert b.draft(2) == [7, 8]


def test_the_latest_of_equal_matches_counts_and_a_longer_one_more() -> None:
    b = bench()
    b.bind([1, 2, 3, 8, 2, 3, 9, 2, 3])
    assert b.draft(1) == [9]
    b.bind([1, 2, 3, 8, 2, 3, 9, 1, 2, 3])
    assert b.draft(1) == [8]


def test_matches_beyond_the_longest_told_apart_are_equal() -> None:
    b = bench(maximum=2)
    b.bind([1, 2, 3, 8, 2, 3, 9, 1, 2, 3])
    assert b.draft(1) == [9]


def test_nothing_shorter_than_the_minimum_is_a_match() -> None:
    b = bench(minimum=3)
    b.bind([1, 2, 3, 8, 2, 3])
    assert b.draft(4) == []
    b.bind([1, 2, 3, 8, 1, 2, 3])
    assert b.draft(1) == [8]


def test_a_repetition_is_expected_to_go_on() -> None:
    b = bench()
    b.bind([5, 1, 2, 3, 1, 2, 3])
    assert b.draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_prompts_shorter_than_a_match_have_no_draft() -> None:
    b = bench(minimum=3)
    for prompt in ([1], [1, 1], [1, 1, 1]):
        b.bind(prompt)
        assert b.draft(4) == []
    b.generate([1])
    assert b.draft(4) == [1, 1, 1, 1]


def test_a_slot_bound_anew_forgets_its_last_sequence() -> None:
    b = bench()
    b.bind([1, 2, 3, 4, 1, 2])
    assert b.draft(1) == [3]
    b.bind([5, 1, 2])
    assert b.draft(1) == []


def test_slots_know_nothing_of_each_other() -> None:
    b = bench()
    b.bind([1, 2, 3, 4], slot=0)
    b.bind([9, 1, 2], slot=1)
    assert b.draft(1, slot=1) == []


def test_guesses_that_do_not_come_true_are_no_longer_made_until_they_do() -> None:
    b = LookupBench(NgramProposer(), max_model_len=4096)
    b.bind([1, 2, 3])
    for fresh in range(10, 40):  # each time, what followed (1, 2) before is wrong
        b.generate([1, 2])
        b.draft(1, 0.3)
        b.generate([fresh])
    b.generate([1, 2])
    assert b.draft(1, 0.3) == []
    assert b.draft(1) == [39]
    for fresh in range(40, 80):  # now it's right
        b.generate([39, fresh, 1, 2])
        b.draft(1, 0.3)
    assert b.draft(1, 0.3) == [39]


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    b = LookupBench(NgramProposer(), max_model_len=4096)
    text = list(range(100, 140))
    b.bind(text + text[:4])
    assert len(b.draft(16)) == 16
    lengths = [len(b.draft(16, p)) for p in (0.1, 0.2, 0.5, 0.9)]
    assert lengths == sorted(lengths, reverse=True)
    assert 16 >= lengths[0] > lengths[-1] == 0
    b.generate(text[4:])
    b.draft(16)
    b.generate(text)
    assert len(b.draft(16, 0.5)) > lengths[2]  # much has come true since


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 4), (5, 4), (-1, -1)])
def test_lengths_of_a_match_that_cannot_be_are_refused(minimum: int, maximum: int) -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min"):
        bench(minimum, maximum)


@pytest.mark.parametrize(
    ("settings", "guess"),
    [
        ({}, [8]),
        ({"prompt_lookup_max": 2}, [9]),
        ({"prompt_lookup_max": 1}, [9]),
        ({"prompt_lookup_min": 4}, []),
    ],
)
def test_it_is_built_from_vllms_keys(settings: dict[str, int], guess: list[int]) -> None:
    target = cast(Target, None)  # it needs nothing of the model
    (proposer,) = build_proposers([{"method": "ngram", **settings}], target)
    assert isinstance(proposer, NgramProposer)
    b = LookupBench(proposer)
    b.bind([1, 2, 3, 8, 2, 3, 9, 1, 2, 3])
    assert b.draft(1) == guess
