"""Which part of a layer each tensor-parallel rank gets: of heads, inner columns, vocabulary.

Parts are ranges side by side, in order of rank. Where they can't be equal, the first ranks have
more heads, and the MLP makes up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.errors import ConfigError

INNER_UNIT = 32
"""Inner columns that stay together: the largest group that quantized weights have in memory."""

_LEAST_INNER_UNIT = 8  # the native backend's experts take no less
_VOCABULARY_UNIT = 64
_MOST_OF_MEAN = (4, 3)  # a fraction, whose module is slow to import
_REMEDY_SIZES = 64


class Heads(NamedTuple):
    """Of one rank, by their numbers in the whole layer. keys: key/value heads."""

    queries: range
    keys: range


def divide_heads(num_heads: int, num_kv_heads: int, size: int) -> tuple[Heads, ...]:
    """For each of `size` ranks. Key/value heads stay with all their queries where there are as many
    as ranks; else each is there several times, with a part of its queries.

    Raises ConfigError where that can't be, or where a rank would have more than 4/3 of the mean.
    """
    if reason := _refusal(num_heads, num_kv_heads, size):
        sizes = ", ".join(map(str, sizes_of_heads(num_heads, num_kv_heads)))
        raise ConfigError(
            f"--tensor-parallel-size {size}: {num_heads} attention heads with {num_kv_heads} "
            f"key/value heads can't be divided by {size} ranks: {reason}. Sizes that work: {sizes}"
        )
    if num_kv_heads >= size:
        sharing = num_heads // num_kv_heads
        return tuple(
            Heads(range(part.start * sharing, part.stop * sharing), part)
            for part in even_parts(num_kv_heads, size)
        )
    copies, own = size // num_kv_heads, num_heads // size
    return tuple(
        Heads(range(rank * own, (rank + 1) * own), range(rank // copies, rank // copies + 1))
        for rank in range(size)
    )


def sizes_of_heads(num_heads: int, num_kv_heads: int) -> list[int]:
    """Numbers of ranks, up to 64, that `divide_heads` does not refuse."""
    sizes = range(1, min(num_heads, _REMEDY_SIZES) + 1)
    return [size for size in sizes if not _refusal(num_heads, num_kv_heads, size)]


def _refusal(num_heads: int, num_kv_heads: int, size: int) -> str:
    """Why heads can't be divided; empty if they can."""
    if num_kv_heads >= size:
        most = -(-num_kv_heads // size)
        over, under = _MOST_OF_MEAN
        if most * size * under <= over * num_kv_heads:
            return ""
        return (
            f"one rank would have {most} of the {num_kv_heads} key/value heads, more than 4/3 of "
            "the mean"
        )
    if size % num_kv_heads == 0 and num_heads % size == 0:
        return ""
    return (
        f"with fewer key/value heads than ranks, the ranks must be a multiple of the "
        f"{num_kv_heads} and the heads one of the ranks"
    )


def divide_inner(
    inner_size: int, taken: Sequence[int], cost: int, *, unit: int = INNER_UNIT
) -> tuple[range, ...]:
    """Of an MLP's inner columns, for each rank, so that the ranks' parameters are as equal as units
    allow.

    taken: parameters that each rank has of the layer's other parts. cost: of one inner column.
    unit: columns that stay together; where the default is too many, fewer do. Raises ConfigError if
    there are fewer units than ranks.
    """
    size = len(taken)
    if unit <= INNER_UNIT and inner_size < unit * size:
        unit = _LEAST_INNER_UNIT
    num_units = -(-inner_size // unit)
    if num_units < size:
        raise ConfigError(
            f"--tensor-parallel-size {size}: an MLP's {inner_size} inner columns, in groups of "
            f"{unit}, can't be divided by {size} ranks. The largest size that works is {num_units}"
        )
    counts = [1] * size
    for _ in range(num_units - size):
        poorest = min(range(size), key=lambda rank: taken[rank] + counts[rank] * unit * cost)
        counts[poorest] += 1
    return _in_units(counts, unit, inner_size)


def divide_vocabulary(vocab_size: int, size: int) -> tuple[range, ...]:
    """Rows of the table and of the head, for each rank. Raises ConfigError for more ranks than
    rows.
    """
    if vocab_size < size:
        raise ConfigError(
            f"--tensor-parallel-size {size}: a vocabulary of {vocab_size} tokens can't be divided "
            f"by {size} ranks. Use {vocab_size} or less"
        )
    unit = min(_VOCABULARY_UNIT, vocab_size // size)
    counts = [len(part) for part in even_parts(-(-vocab_size // unit), size)]
    return _in_units(counts, unit, vocab_size)


def even_parts(count: int, size: int) -> tuple[range, ...]:
    """`count` things side by side in `size` parts that differ by one at most, larger ones first."""
    each, more = divmod(count, size)
    return _in_units([each + (rank < more) for rank in range(size)], 1, count)


def _in_units(counts: Sequence[int], unit: int, end: int) -> tuple[range, ...]:
    """So many units for each rank; the last one ends where all do."""
    parts, first = [], 0
    for count in counts:
        last = min(first + count * unit, end)
        parts.append(range(first, last))
        first = last
    return tuple(parts)
