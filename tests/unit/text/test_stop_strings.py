from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import RequestError
from octavo.text.stop_strings import StopStringMatcher
from support.processor_time import takes_less_than


def run(stop: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """(what is shown after each piece and at the end, the stop string)."""
    matcher = StopStringMatcher(stop, include)
    shown = []
    for piece in pieces:
        text, found = matcher.push(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, matcher.flush()], None


def test_str_01_pieces_of_a_stop_string_are_held_back() -> None:
    assert run(["STOP!"], ["go ", "ST", "OP", "!"]) == (["go ", "", "", ""], "STOP!")
    assert run(["STOP!"], ["ST", "OP", " sign"]) == (["", "", "STOP sign", ""], None)
    assert run(["STOP!"], ["go ", "ST", "OP"]) == (["go ", "", "", "STOP"], None)


def test_spd_02_found_anywhere_in_a_long_piece() -> None:
    assert run(["x!"], ["x!" + "abcdefg" * 8]) == ([""], "x!")
    assert run(["END"], ["some E", "ND and eight more words after it"]) == (["some ", ""], "END")
    assert run(["END"], ["some E", "ND and"], include=True) == (["some ", "END"], "END")


def test_only_the_longest_possible_start_is_held() -> None:
    assert run(["aab"], ["aaa"]) == (["a", "aa"], None)
    assert run(["\n\n", "###"], ["x#\n"]) == (["x#", "\n"], None)


def test_the_match_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run(["b", "ab"], ["xab"]) == (["x"], "ab")  # same end: the one that starts first
    assert run(["late", "now"], ["now late"]) == ([""], "now")


def test_no_stop_strings() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop string is empty"):
        StopStringMatcher(["a", ""])


def test_not_armed_shows_matches_as_text() -> None:
    matcher = StopStringMatcher(["aa"])
    assert matcher.push("xaa", armed=False) == ("xa", None)  # the last a may begin another
    assert matcher.push("a") == ("", "aa")


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.booleans(),
    st.data(),
)
def test_equals_a_search_of_the_whole_text(
    text: str, stop: list[str], include: bool, data: st.DataObject
) -> None:
    """However the text is cut: the same as trying every end position in turn."""
    expected: tuple[str, str | None] = (text, None)
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            expected = (text[: end if include else end - len(longest)], longest)
            break
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopStringMatcher(stop, include)
    shown = ""
    for i, piece in enumerate(pieces):
        emitted, found_now = matcher.push(piece)
        shown += emitted
        if found_now is not None:
            assert (shown, found_now) == expected
            return
        # Held back: exactly the longest suffix that begins a stop string.
        sofar = "".join(pieces[: i + 1])
        held = sofar[len(shown) :]
        starts = [k for k in range(len(sofar) + 1) if any(s.startswith(sofar[k:]) for s in stop)]
        assert held == (sofar[min(starts) :] if starts else "")
    assert (shown + matcher.flush(), None) == expected


def test_long_stop_strings_cost_no_more_per_character() -> None:
    # Comparing every suffix anew would take 10,000 x 20,000 steps and more.
    matcher = StopStringMatcher(["a" * 10_000 + "b"])
    with takes_less_than(5):
        shown = "".join(matcher.push("aaaa")[0] for _ in range(5_000))
    assert shown + matcher.flush() == "a" * 20_000
