"""Who gets which part of a layer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.parallel.division import (
    Heads,
    divide_heads,
    divide_inner,
    divide_vocabulary,
    even_parts,
    sizes_of_heads,
)

SIZES = st.integers(1, 16)


def check_parts(parts: tuple[range, ...], count: int) -> None:
    """Each thing is given out once, in order."""
    assert [thing for part in parts for thing in part] == list(range(count))


@given(st.integers(1, 300), SIZES)
def test_even_parts_give_everything_once(count: int, size: int) -> None:
    parts = even_parts(count, size)
    check_parts(parts, count)
    lengths = [len(part) for part in parts]
    assert len(parts) == size
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 24), st.integers(1, 8), SIZES)
def test_heads_are_divided_or_refused(num_kv_heads: int, sharing: int, size: int) -> None:
    num_heads = num_kv_heads * sharing
    if size not in sizes_of_heads(num_heads, num_kv_heads):
        counts = f"{num_heads} attention heads with {num_kv_heads} key/value heads"
        with pytest.raises(ConfigError, match=f"{counts} can't be divided by {size} ranks"):
            divide_heads(num_heads, num_kv_heads, size)
        return
    ranks = divide_heads(num_heads, num_kv_heads, size)
    check_parts(tuple(rank.queries for rank in ranks), num_heads)
    for rank in ranks:
        # A rank's queries fall to its keys as the whole layer's fall to all keys.
        local = len(rank.queries) // len(rank.keys)
        for place, query in enumerate(rank.queries):
            assert rank.keys[place // local] == query // sharing
    if size <= num_kv_heads:
        check_parts(tuple(rank.keys for rank in ranks), num_kv_heads)
        assert 3 * size * max(len(rank.keys) for rank in ranks) <= 4 * num_kv_heads
    else:
        assert [rank.keys[0] for rank in ranks] == sorted(
            [*range(num_kv_heads)] * (size // num_kv_heads)
        )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 9])
def test_a_size_that_divides_the_heads_is_never_refused(count: int) -> None:
    for size in range(1, count + 1):
        if count % size == 0:
            assert len(divide_heads(count, count, size)) == size


def test_three_key_heads_on_two_ranks() -> None:
    assert divide_heads(9, 3, 2) == (
        Heads(range(6), range(2)),
        Heads(range(6, 9), range(2, 3)),
    )


def test_key_heads_are_there_several_times_where_ranks_are_more() -> None:
    assert [rank.keys for rank in divide_heads(4, 2, 4)] == [range(1)] * 2 + [range(1, 2)] * 2
    assert divide_heads(8, 1, 2) == (
        Heads(range(4), range(1)),
        Heads(range(4, 8), range(1)),
    )


@pytest.mark.parametrize(
    ("heads", "size", "reason", "sizes"),
    [
        ((4, 4), 3, "2 of the 4 key/value heads", "1, 2, 4"),  # MDL-08
        ((9, 3), 4, "a multiple of the 3", "1, 2, 3, 9"),
        ((6, 2), 4, "the heads one of the ranks", "1, 2, 6"),
        ((4, 4), 8, "the heads one of the ranks", "1, 2, 4"),
    ],
)
def test_refusals_say_the_numbers_and_what_works(
    heads: tuple[int, int], size: int, reason: str, sizes: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        divide_heads(*heads, size)
    message = str(caught.value)
    assert message.startswith(f"--tensor-parallel-size {size}: {heads[0]} attention heads")
    assert reason in message
    assert message.endswith(f"Sizes that work: {sizes}")


@given(
    st.integers(8, 40_000),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=16),
    st.integers(1, 10**5),
    st.sampled_from([32, 64, 256]),
)
def test_inner_columns_are_divided_in_units(
    inner: int, taken: list[int], cost: int, unit: int
) -> None:
    size = len(taken)
    used = 8 if unit == 32 and inner < 32 * size else unit
    if -(-inner // used) < size:
        with pytest.raises(ConfigError, match=f"{inner} inner columns, .* {size} ranks"):
            divide_inner(inner, taken, cost, unit=unit)
        return
    parts = divide_inner(inner, taken, cost, unit=unit)
    check_parts(parts, inner)
    assert all(part.start % used == 0 for part in parts)
    assert all(len(part) > 0 for part in parts)
    # No rank with more than one unit could give one to another and leave the worst one better off.
    totals = [t + -(-len(part) // used) * used * cost for t, part in zip(taken, parts, strict=True)]
    for part, total in zip(parts, totals, strict=True):
        if len(part) > used:
            assert total <= min(totals) + used * cost


def test_the_default_model_is_balanced() -> None:
    """9 query and 3 key/value heads of 64, hidden 576, inner 1536."""
    of_heads = [576 * 64 * 2 * (len(q) + len(k)) for q, k in divide_heads(9, 3, 2)]
    parts = divide_inner(1536, of_heads, 3 * 576)
    assert parts == (range(672), range(672, 1536))
    first, second = (
        taken + 3 * 576 * len(part) for taken, part in zip(of_heads, parts, strict=True)
    )
    assert abs(first - second) / (first + second) < 0.02


@given(st.integers(1, 300_000), SIZES)
def test_vocabulary_is_divided_in_rows_of_64(vocab_size: int, size: int) -> None:
    if vocab_size < size:
        with pytest.raises(ConfigError, match=f"{vocab_size} tokens .* {size} ranks"):
            divide_vocabulary(vocab_size, size)
        return
    parts = divide_vocabulary(vocab_size, size)
    check_parts(parts, vocab_size)
    if vocab_size >= 64 * size:
        assert all(part.start % 64 == 0 for part in parts)
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 128


def test_vocabulary_of_the_default_model() -> None:
    assert divide_vocabulary(49152, 2) == (range(24576), range(24576, 49152))


def test_parts_lie_side_by_side() -> None:
    for one, other in pairwise(divide_vocabulary(320, 4)):
        assert one.stop == other.start
