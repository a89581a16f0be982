from __future__ import annotations

from typing import cast

import pytest

from octavo.core.errors import ConfigError
from octavo.speculative.registry import Target, build_proposers
from octavo.speculative.suffix import PastOutputs, SuffixProposer
from support.lookup import LookupBench


def bench(max_tree_depth: int = 24, max_cached_tokens: int = 1000) -> LookupBench:
    return LookupBench(
        SuffixProposer(max_tree_depth=max_tree_depth, max_cached_tokens=max_cached_tokens), 256
    )


def test_the_text_itself_is_looked_up() -> None:
    b = bench()
    b.bind([1, 2, 3, 4, 5, 9, 2, 3])
    assert b.draft(3) == [4, 5, 9]


def test_most_occurrences_decide_and_the_latest_breaks_a_tie() -> None:
    b = bench(max_tree_depth=2)
    b.bind([1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2])
    assert b.draft(1) == [7]
    b.bind([1, 2, 7, 1, 2, 8, 1, 2])
    assert b.draft(1) == [8]


def test_who_was_outvoted_has_no_vote_on_what_comes_after() -> None:
    b = bench(max_tree_depth=2)
    b.bind([1, 2, 7, 3, 0, 1, 2, 7, 3, 4, 1, 2, 8, 6, 1, 2, 8, 6, 5, 1, 2, 7, 3, 4, 1, 2])
    assert b.draft(3) == [7, 3, 4]


def test_an_ended_output_is_looked_up_by_others_but_no_prompt_is() -> None:
    b = bench()
    b.bind([1, 2, 3])
    b.generate([4, 5])
    b.generate([6, 7])
    b.bind([8, 4, 5])
    assert b.draft(4) == [6, 7]
    b.bind([8, 2, 3])
    assert b.draft(4) == []


def test_a_running_sequence_sees_outputs_that_end_meanwhile() -> None:
    b = bench()
    b.bind([9, 4, 5], slot=1)
    b.bind([1], slot=0)
    b.generate([4, 5, 6], slot=0)
    assert b.draft(1, slot=1) == []
    b.bind([2], slot=0)
    assert b.draft(1, slot=1) == [6]


def test_the_texts_own_past_comes_first_where_others_match_no_longer() -> None:
    b = bench()
    b.bind([1])
    b.generate([3, 4, 5, 6])
    b.bind([4, 5, 7, 4, 5])
    assert b.draft(1) == [7]
    b.bind([4, 5, 7, 3, 4, 5])
    assert b.draft(1) == [6]


def test_requests_with_another_cache_salt_share_nothing() -> None:
    b = bench()
    for salt in ("", "a"):
        b.bind([1], salt=salt)
        b.generate([4, 5, 6])
    b.bind([8, 4, 5], salt="b")
    assert b.draft(1) == []
    b.bind([8, 4, 5], salt="a")
    assert b.draft(1) == [6]
    b.bind([8, 4, 5], salt="")
    assert b.draft(1) == [6]


def test_what_was_generated_before_a_preemption_is_kept_once() -> None:
    b = bench(max_tree_depth=2)
    b.bind([1])
    b.generate([4, 5, 6])
    b.bind([2])  # takes the slot of the first, which returns, with what it generated
    b.bind([1, 4, 5, 6], num_prompt=1)
    b.generate([9])
    for _ in range(2):
        b.bind([2])
        b.generate([4, 5, 7])
    b.bind([8, 4, 5])
    assert b.draft(1) == [7]  # 2 of 3


def test_past_outputs_are_bounded_and_the_oldest_are_forgotten() -> None:
    past = PastOutputs(100)
    for first in range(0, 100, 10):
        past.add("" if first % 20 else "a", range(first * 10, first * 10 + 10))
    kept = [list(h.token_ids) for salt in ("", "a") for h in past.histories(salt)]
    tokens = {token_id for token_ids in kept for token_id in token_ids} - {-1}
    assert sum(map(len, kept)) <= 100 + 2 * 10  # and boundaries
    assert tokens == {t for first in range(0, 100, 10) for t in range(first * 10, first * 10 + 10)}
    past.add("a", range(5000, 5010))
    assert [0] not in [h.token_ids[1:2].tolist() for h in past.histories("a")]


def test_of_an_output_that_is_too_long_the_end_is_kept() -> None:
    past = PastOutputs(100)
    past.add("", range(1000))
    assert past.histories("")[0].token_ids[1:-1].tolist() == list(range(950, 1000))


@pytest.mark.parametrize("max_cached_tokens", [0, 1, 4])
def test_no_room_for_outputs_keeps_none(max_cached_tokens: int) -> None:
    b = bench(max_cached_tokens=max_cached_tokens)
    b.bind([1])
    b.generate([4, 5, 6, 7])
    b.bind([8, 4, 5])
    assert b.draft(1) == []


def test_contested_guesses_are_less_likely() -> None:
    b = bench(max_tree_depth=2)
    b.bind([1, 2, 7, 1, 2, 8, 1, 2])
    assert b.draft(4, 0.4) == []
    b.bind([1, 2, 7, 1, 2, 7, 1, 2])
    assert b.draft(4, 0.4) == [7]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tree_depth is 1"):
        SuffixProposer(max_tree_depth=1)
    with pytest.raises(ConfigError, match="max_cached_tokens is -1"):
        SuffixProposer(max_cached_tokens=-1)


def test_it_is_built_from_its_settings() -> None:
    settings = {"suffix_decoding_max_tree_depth": 2, "suffix_decoding_max_cached_tokens": 0}
    target = cast(Target, None)  # it needs nothing of the model
    (proposer,) = build_proposers([{"method": "suffix", **settings}], target)
    assert isinstance(proposer, SuffixProposer)
    b = LookupBench(proposer)
    b.bind([1, 2, 3, 8, 2, 3, 9, 1, 2, 3])
    assert b.draft(1) == [9]
    b.generate([4])
    b.bind([5, 3, 4])
    assert b.draft(1) == []
