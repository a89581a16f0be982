from __future__ import annotations

from array import array

import pytest

from octavo.speculative.history import BOUNDARY, MAX_CANDIDATES, History, Match


def history(*sequences: list[int], ngram: int = 2) -> History:
    result = History(ngram)
    for token_ids in sequences:
        result.extend(token_ids)
        result.end_sequence()
    return result


def context(*token_ids: int) -> array[int]:
    return array("i", [BOUNDARY, *token_ids])


def test_the_longest_match_is_found_not_the_latest() -> None:
    found = history([1, 2, 3, 4, 9, 9, 3, 4, 8]).find(context(1, 2, 3, 4), longest=10)
    assert found == Match(4, [5])


def test_matches_that_are_longer_than_told_apart_are_all_given_latest_first() -> None:
    found = history([1, 2, 3, 4, 9, 9, 3, 4, 8]).find(context(1, 2, 3, 4), longest=2)
    assert found == Match(2, [9, 5])


def test_a_match_does_not_reach_over_the_beginning_of_a_sequence() -> None:
    found = history([7, 1, 2], [3, 4, 5]).find(context(7, 1, 2, 3, 4), longest=10)
    assert found == Match(2, [7])


def test_a_whole_context_can_match() -> None:
    past = history([5, 1, 2, 3], [1, 2, 4])
    assert past.find(context(1, 2), longest=10) == Match(2, [8, 4])


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
def test_only_whole_ngrams_match(ngram: int) -> None:
    past = history([1, 2, 3, 4, 5, 6], ngram=ngram)
    end = [0, *range(1, 6)][-ngram:]
    assert past.find(context(*end), longest=10) == Match(ngram, [6])
    assert past.find(context(0, *end[1:]), longest=10) is None
    assert past.find(context(*end[1:]), longest=10) is None


def test_the_end_of_a_growing_sequence_is_no_occurrence_of_itself() -> None:
    growing = History(2)
    growing.extend([1, 2])
    assert growing.find(growing.token_ids, longest=8) is None
    growing.extend([1, 2])
    assert growing.find(growing.token_ids, longest=8) == Match(2, [3])


def test_the_end_of_an_ended_sequence_is_no_occurrence() -> None:
    past = history([9, 1, 2, 5], [9, 1, 2])
    assert past.find(context(8, 1, 2), longest=8) == Match(2, [4])
    assert history([9, 1, 2]).find(context(8, 1, 2), longest=8) is None


def test_tokens_are_found_however_they_arrived() -> None:
    at_once, one_by_one = History(3), History(3)
    token_ids = [1, 2, 3, 1, 2, 3, 4, 1, 2, 3]
    at_once.extend(token_ids)
    for token_id in token_ids:
        one_by_one.extend([token_id])
        found = one_by_one.find(one_by_one.token_ids, longest=8)
    assert found == at_once.find(at_once.token_ids, longest=8) == Match(3, [7, 4])


def test_what_follows_ends_with_its_sequence() -> None:
    past = history([1, 2, 3], [4, 5, 6])
    assert past.following(2, 9).tolist() == [2, 3]
    assert past.following(5, 2).tolist() == [4, 5]


def test_a_sequence_that_has_not_ended_goes_on_repeating_itself() -> None:
    growing = History(2)
    growing.extend([9, 1, 2, 3, 1, 2])
    found = growing.find(growing.token_ids, longest=8)
    assert found == Match(2, [4])
    assert growing.following(4, 7).tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_a_search_looks_only_at_the_latest_occurrences() -> None:
    repeated = [1, 2, 0] * (MAX_CANDIDATES - 1)
    near = history([8, 1, 2, 3, *repeated])
    assert near.find(context(8, 1, 2), longest=8) == Match(3, [4])
    far = history([8, 1, 2, 3, 1, 2, 0, *repeated])
    assert far.find(context(8, 1, 2), longest=8).length == 2  # type: ignore[union-attr]
