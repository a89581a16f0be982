from __future__ import annotations

import numpy as np

from octavo.runner.speculation import Draft, Verified
from octavo.sampling.sampler import SampledRows
from octavo.speculative.verify import verify

OTHER_ROWS = 2
"""Of other sequences, before the draft's."""


def sampled(
    *tokens: int, broken: tuple[int, ...] = (), refused: tuple[int, ...] = ()
) -> SampledRows:
    """The tokens of a draft's rows; broken, refused: which of these failed."""
    errors = {OTHER_ROWS + row: f"row {row} failed" for row in (*broken, *refused)}
    token_ids = np.array([0] * OTHER_ROWS + list(tokens))
    return SampledRows(token_ids, {}, errors, frozenset(OTHER_ROWS + row for row in refused))


def verified(tokens: list[int], rows: SampledRows, parents: list[int] | None = None) -> Verified:
    draft = Draft(np.array(tokens), None if parents is None else np.array(parents))
    result = verify(draft, rows, OTHER_ROWS)
    return result._replace(rows=tuple(row - OTHER_ROWS for row in result.rows))


def test_a_chain_stands_up_to_its_first_wrong_guess() -> None:
    guesses = [5, 6, 7]
    assert verified(guesses, sampled(9, 0, 0, 0)) == ((9,), (), (0,), None, False)
    assert verified(guesses, sampled(5, 9, 7, 3)) == ((5, 9), (0,), (0, 1), None, False)
    whole = verified(guesses, sampled(5, 6, 7, 3))
    assert whole == ((5, 6, 7, 3), (0, 1, 2), (0, 1, 2, 3), None, False)


def test_a_token_that_equals_a_guess_further_down_is_no_guess() -> None:
    assert verified([5, 6, 7], sampled(6, 7, 3, 3)).token_ids == (6,)


def test_the_walk_down_a_tree_takes_one_sibling_at_each_level() -> None:
    #        5        6
    #      5   8    5   9
    #      7
    guesses, parents = [5, 6, 5, 8, 5, 9, 7], [-1, -1, 0, 0, 1, 1, 2]

    def walk(*tokens: int) -> Verified:
        return verified(guesses, sampled(*tokens), parents)

    path = walk(6, 1, 9, 1, 1, 1, 4, 1)  # row 2 is of the guess 6, row 6 of the 9 below it
    assert path == ((6, 9, 4), (1, 5), (0, 2, 6), None, False)
    assert walk(5, 5, 1, 7, 1, 1, 1, 2) == ((5, 5, 7, 2), (0, 2, 6), (0, 1, 3, 7), None, False)
    assert walk(5, 9, 1, 1, 1, 1, 1, 1) == ((5, 9), (0,), (0, 1), None, False)
    assert walk(7, 1, 1, 1, 1, 1, 1, 1) == ((7,), (), (0,), None, False)


def test_an_error_after_the_last_known_token_is_the_sequences() -> None:
    found = verified([5], sampled(0, 3, broken=(0,)))
    assert found == ((), (), (), "row 0 failed", False)
    found = verified([5], sampled(0, 3, refused=(0,)))
    assert found == ((), (), (), "row 0 failed", True)


def test_a_guess_whose_own_row_failed_is_the_last_token_and_not_an_accepted_guess() -> None:
    found = verified([5, 6], sampled(5, 6, 0, broken=(2,)))
    assert found == ((5, 6), (0,), (0, 1), None, False)
    assert verified([5, 6], sampled(5, 0, 0, broken=(1, 2))) == ((5,), (), (0,), None, False)


def test_an_error_off_the_path_does_not_matter() -> None:
    assert verified([5, 6], sampled(9, 0, 0, broken=(1, 2))).token_ids == (9,)
    assert verified([5, 6], sampled(5, 9, 0, refused=(2,))).token_ids == (5, 9)
