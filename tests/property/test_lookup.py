"""Drafts that are looked up, against searches that try everything."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.speculative.history import MAX_CANDIDATES
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.suffix import SuffixProposer
from support.lookup import LookupBench

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def occurrences(text: list[int], context: list[int], minimum: int, longest: int) -> dict[int, int]:
    """Where in `text` its tokens are followed by more and end as `context` does -> by how many."""
    found: dict[int, int] = {}
    for place in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(place, longest, len(context)):
            if text[place - 1 - length] != context[-1 - length]:
                break
            length += 1
        if length >= minimum:
            found[place] = length
    return dict(list(found.items())[:MAX_CANDIDATES])


def going_on(text: list[int], place: int, length: int) -> list[int]:
    """What came after `place`; a text that ends there repeats itself."""
    grown = list(text)
    while len(grown) < place + length:
        grown.append(grown[place + len(grown) - len(text)])
    return grown[place : place + length]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(TOKENS, min_size=1, max_size=4),
    minimum=st.integers(1, 4),
    extra=st.integers(0, 4),
    length=st.integers(1, 8),
)
def test_prompt_lookup_finds_what_a_search_of_everything_finds(
    pieces: list[list[int]], minimum: int, extra: int, length: int
) -> None:
    longest = minimum + extra
    b = LookupBench(NgramProposer(prompt_lookup_min=minimum, prompt_lookup_max=longest), 256)
    b.bind([0])  # is forgotten
    b.draft(1)
    text: list[int] = []
    for piece in pieces:
        if text:
            b.generate(piece)
        else:
            b.bind(piece)
        text += piece
        found = occurrences(text, text, minimum, longest)
        if not found:
            assert b.draft(length) == []
            continue
        place = max(found, key=lambda place: (found[place], place))
        assert b.draft(length) == going_on(text, place, length)
        for min_probability in (0.2, 0.5):
            surer = b.draft(length, min_probability)
            assert surer == going_on(text, place, length)[: len(surer)]


@settings(max_examples=200, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(TOKENS, TOKENS, st.sampled_from(["", "a"]), st.integers(0, 1)),
        min_size=1,
        max_size=5,
    ),
    depth=st.integers(2, 6),
    length=st.integers(1, 8),
)
def test_suffix_decoding_guesses_what_followed_one_of_the_longest_matches(
    sequences: list[tuple[list[int], list[int], str, int]], depth: int, length: int
) -> None:
    b = LookupBench(SuffixProposer(max_tree_depth=depth, max_cached_tokens=10_000), 256)
    past: dict[str, list[list[int]]] = defaultdict(list)
    last: dict[int, tuple[str, list[int]]] = {}
    for prompt, output, salt, slot in sequences:
        if slot in last:
            past[last[slot][0]].append(last[slot][1])
        last[slot] = salt, output
        b.bind(prompt, slot=slot, salt=salt)
        b.generate(output, slot=slot)
        text = prompt + output
        draft = b.draft(length, slot=slot)
        # Of the past outputs together no more occurrences are looked at than of one text.
        others = [(o, occurrences(o, text, 2, depth)) for o in past[salt]]
        own = occurrences(text, text, 2, depth)
        most = max([0, *own.values(), *(n for _, found in others for n in found.values())])
        if not most:
            assert draft == []
        elif most in own.values():
            assert draft in [going_on(text, p, length) for p, n in own.items() if n == most]
        elif sum(len(found) for _, found in others) <= MAX_CANDIDATES:
            assert draft
            assert draft in [
                o[p : p + length][: len(draft)]
                for o, found in others
                for p, n in found.items()
                if n == most
            ]
