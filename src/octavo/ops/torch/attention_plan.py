"""How a step's attention is cut into matrix products: numbers only, worked out once a step.

Keys are reduced in tiles: tile i holds positions [i * tile, (i + 1) * tile) of every sequence,
whatever chunk or batch the query arrives in. The tiles of a query are merged in rising order
(attention.py), so the order of each sum is fixed by the query's position alone.

A sequence with one query (decode) gives one item per tile; items of similar length are gathered and
multiplied together. A sequence with more queries (a chunk of a prompt) is walked tile by tile, only
with the queries that see the tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from octavo.ops.batch import HostBatch

MAX_TILE = 192
"""Keys reduced in one product. MKL cuts longer sums in pieces whose sizes depend on the length, so
that a masked tail would change a row (measured: 208 is cut, 192 is not)."""

LANES = 16
"""Tiles are padded to a multiple of it, so that vectorised sums have no remainder."""


GATHER_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
"""Keys (and as many values) copied out of the cache at a time. On a CPU they should still be in its
cache when they are multiplied: 16 sequences of 1000 tokens: 118 ms a step, 408 in one copy. A GPU
waits for launches, so it takes more at once; the copies and what is made of them need about six
times as much memory."""


class PlanKey(NamedTuple):
    """What a plan depends on besides the batch. queries_per_kv: query heads that share a key head.
    token_bytes: of one token's keys. has_distances: whether to say how far keys are from queries.
    is_latent: keys and values are the same vectors.
    """

    window: int | None
    chunk: int | None
    block_size: int
    queries_per_kv: int
    token_bytes: int
    dtype: torch.dtype
    device: torch.device
    has_distances: bool = False
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """Stretches of cached tokens to copy out, all `length` long. blocks: (n * length / B,) ids.

    hidden: tokens of the copy that no query may see, as indices into (n * length,); what the cache
    holds there is arbitrary (even NaN), so it is overwritten with zeros.
    """

    count: int
    length: int
    blocks: torch.Tensor
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Items multiplied together. sequences (n,): rows of `DecodePlan.rows`. mask (n, 1, 1, L).
    distances: (n, 1, L), positions of keys minus those of queries, if the plan has any.
    """

    keys: Keys
    sequences: torch.Tensor
    mask: torch.Tensor | None
    distances: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """rows (S',): the query of each sequence, those with the most tiles first.

    order: brings the groups' items, one after another, into the order "first tile of every
    sequence, second tile of those that have one, ..."; counts: how many have an i-th tile.
    """

    rows: torch.Tensor
    groups: list[DecodeGroup]
    order: torch.Tensor
    counts: list[int]


class Segment(NamedTuple):
    """Queries [start, stop) of a chunk against one tile. mask: (rows, L), rows padded as queries.

    is_first: none of these queries sees an earlier tile. distances: (1, stop - start, L), positions
    of keys minus those of queries, if the plan has any.
    """

    start: int
    stop: int
    mask: torch.Tensor | None
    is_first: bool
    distances: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A sequence with queries at rows [start, stop) of the step."""

    start: int
    stop: int
    tiles: list[tuple[Keys, list[Segment]]]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """max_copy_tokens: of the largest `Keys`. buffers: for copies of keys and of values, made by
    the first layer and used by all: memory fresh from the system costs more than the copy.
    """

    decode: DecodePlan | None
    chunks: list[ChunkPlan]
    max_copy_tokens: int
    buffers: list[torch.Tensor] = field(default_factory=list)


class _Tree(NamedTuple):
    """Rows of a tree. visible (rows, context): which cached tokens each of them sees. keys
    (context,), queries (rows,): where in the text they stand.
    """

    visible: np.ndarray
    keys: np.ndarray
    queries: np.ndarray


def padded_rows(rows: int) -> int:
    """MKL sums in one order for any multiple of 4 rows, in others for 1, 2, 3, 5, ... rows."""
    return -(-rows // 4) * 4


class Planner:
    """Cuts one batch for one kind of layer."""

    def __init__(self, host: HostBatch, key: PlanKey) -> None:
        self.host = host
        self.key = key
        self.granule = math.lcm(key.block_size, LANES)
        self.gather_tokens = GATHER_BYTES[key.device.type] // key.token_bytes
        self.tile = max(MAX_TILE // self.granule, 1) * self.granule

    def plan(self) -> AttentionPlan:
        num_queries = np.diff(self.host.query_starts)
        decoding = np.flatnonzero(num_queries == 1)
        decode = self._decode(decoding) if len(decoding) else None
        chunks = [self._chunk(int(s)) for s in np.flatnonzero(num_queries > 1)]
        copies = [group.keys for group in decode.groups] if decode is not None else []
        copies += [keys for chunk in chunks for keys, _ in chunk.tiles]
        return AttentionPlan(decode, chunks, max(keys.count * keys.length for keys in copies))

    def _first_visible(self, position: int) -> int:
        return int(self._first_visible_of(np.array(position)))

    def _first_visible_of(self, positions: np.ndarray) -> np.ndarray:
        """The first token that a query at each of these positions sees."""
        window, chunk = self.key.window, self.key.chunk
        first: np.ndarray = np.zeros_like(positions)
        if window is not None:
            first = np.maximum(positions - window + 1, 0)
        return first if chunk is None else np.maximum(first, positions // chunk * chunk)

    def _tiles(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Tiles as [start, stop), over positions [first, stop); the first one without what only
        lies before `first`, the last one without what is not there.
        """
        for start in range(first // self.tile * self.tile, stop, self.tile):
            trimmed = max(start, first // self.granule * self.granule)
            yield trimmed, min(start + self.tile, stop)

    def _padded(self, length: int) -> int:
        return -(-length // self.granule) * self.granule

    def _keys(
        self, sequences: np.ndarray, starts: np.ndarray, length: int, visible: np.ndarray
    ) -> Keys:
        """visible: (n, length)."""
        size = self.key.block_size
        last_blocks = (self.host.context_lens[sequences] - 1) // size
        blocks = starts[:, None] // size + np.arange(length // size)
        # Past its end a sequence's last block stands in: it exists, and is hidden.
        blocks = np.minimum(blocks, last_blocks[:, None])
        ids = self.host.block_tables[sequences[:, None], blocks]
        hidden = np.flatnonzero(~visible)
        return Keys(
            count=len(sequences),
            length=length,
            blocks=self._index(ids.reshape(-1)),
            hidden=self._index(hidden) if len(hidden) else None,
        )

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.key.device)

    def _mask(self, visible: np.ndarray) -> torch.Tensor | None:
        if visible.all():
            return None
        mask = torch.from_numpy(np.where(visible, np.float32(0.0), np.float32("-inf")))
        return mask.to(self.key.device, self.key.dtype)

    def _decode(self, sequences: np.ndarray) -> DecodePlan:
        contexts = self.host.context_lens
        tiles = {
            int(s): list(self._tiles(self._first_visible(int(contexts[s]) - 1), int(contexts[s])))
            for s in sequences
        }
        ranked = sorted(tiles, key=lambda s: -len(tiles[s]))
        counts: list[int] = []
        items: list[tuple[int, int, int]] = []  # rank of the sequence, start, stop
        while alive := sum(len(tiles[s]) > len(counts) for s in ranked):
            items += [(r, *tiles[s][len(counts)]) for r, s in enumerate(ranked[:alive])]
            counts.append(alive)
        lengths = [self._padded(stop - start) for _, start, stop in items]
        by_length = sorted(range(len(items)), key=lambda i: -lengths[i])
        groups: list[DecodeGroup] = []
        for members in self._alike(by_length, lengths):
            ranks, starts, stops = np.array([items[i] for i in members]).T
            members_sequences = np.array(ranked)[ranks]
            first = [self._first_visible(int(contexts[s]) - 1) for s in members_sequences]
            length = lengths[members[0]]
            positions = starts[:, None] + np.arange(length)
            visible = (positions >= np.array(first)[:, None]) & (positions < stops[:, None])
            queries = contexts[members_sequences] - 1
            groups.append(
                DecodeGroup(
                    keys=self._keys(members_sequences, starts, length, visible),
                    sequences=self._index(ranks),
                    mask=self._mask(visible[:, None, None, :]),
                    distances=self._distances(positions[:, None], queries[:, None, None]),
                )
            )
        return DecodePlan(
            rows=self._index(self.host.query_starts[ranked]),
            groups=groups,
            order=self._index(np.argsort(by_length)),
            counts=counts,
        )

    def _alike(self, by_length: list[int], lengths: list[int]) -> Iterator[list[int]]:
        """Split items, longest first, so that padding at most doubles a group and its copy fits."""
        group: list[int] = []
        for item in by_length:
            longest = lengths[group[0]] if group else 0
            too_many = (len(group) + 1) * longest > self.gather_tokens
            if group and (too_many or 2 * lengths[item] < longest):
                yield group
                group = []
            group.append(item)
        yield group

    def _chunk(self, sequence: int) -> ChunkPlan:
        start, stop = (int(x) for x in self.host.query_starts[sequence : sequence + 2])
        context = int(self.host.context_lens[sequence])
        origin = context - (stop - start)  # position of the chunk's first query
        tree = self._tree(start, stop, context)
        tiles = []
        for first_key, last_key in self._tiles(self._first_visible(origin), context):
            length = self._padded(last_key - first_key)
            exists = (first_key + np.arange(length) < last_key)[None, :]
            keys = self._keys(np.array([sequence]), np.array([first_key]), length, exists)
            if tree is None:
                segments = self._segments(origin, context, first_key, last_key, length)
            else:
                segments = self._tree_segments(tree, first_key, length)
            tiles.append((keys, list(segments)))
        return ChunkPlan(start, stop, tiles)

    def _tree(self, start: int, stop: int, context: int) -> _Tree | None:
        """None if these rows are a chain."""
        if self.host.parents is None:
            return None
        count = stop - start
        parents = self.host.parents[start:stop] - start
        if np.array_equal(parents[1:], np.arange(count - 1)):
            return None
        on_path = np.eye(count, dtype=bool)
        for row in range(1, count):
            on_path[row] |= on_path[parents[row]]
        positions = self.host.positions[start:stop]
        cached = np.concatenate([np.arange(context - count), positions])
        visible: np.ndarray = cached >= self._first_visible_of(positions)[:, None]
        visible[:, context - count :] &= on_path
        return _Tree(visible, cached, positions)

    def _tree_segments(self, tree: _Tree, first_key: int, length: int) -> Iterator[Segment]:
        """Cut the rows of a tree where they begin or cease to see any of `length` keys from
        `first_key` on, or any before them.
        """
        part = tree.visible[:, first_key : first_key + length]
        visible = np.pad(part, ((0, 0), (0, length - part.shape[1])))
        keys = np.resize(tree.keys[first_key:], length)  # beyond the last, nobody looks at them
        sees_any = [bool(row.any()) for row in visible]
        is_first = [not row[:first_key].any() for row in tree.visible]
        start = 0
        for (sees, first), rows in groupby(zip(sees_any, is_first, strict=True)):
            stop = start + sum(1 for _ in rows)
            if sees:
                mask = self._row_mask(visible[start:stop])
                distances = self._distances(keys, tree.queries[None, start:stop, None])
                yield Segment(start, stop, mask, first, distances)
            start = stop

    def _segments(
        self, origin: int, context: int, first_key: int, last_key: int, length: int
    ) -> Iterator[Segment]:
        """Cut the queries that see keys [first_key, last_key) where masks begin and end."""
        window = context if self.key.window is None else self.key.window
        low, high = max(origin, first_key), min(context, last_key - 1 + window)
        cuts = {low, last_key - 1, first_key + window}
        if (chunk := self.key.chunk) is not None:
            high = min(high, ((last_key - 1) // chunk + 1) * chunk)
            cuts |= set(range(low // chunk * chunk, high, chunk))
        cuts.add(high)
        edges = sorted(p for p in cuts if low <= p <= high)
        for begin, end in pairwise(edges):
            queries = np.arange(begin, end)[:, None]
            keys = first_key + np.arange(length)[None, :]
            visible = (keys <= queries) & (keys >= self._first_visible_of(queries))
            yield Segment(
                start=begin - origin,
                stop=end - origin,
                mask=self._row_mask(visible),
                is_first=self._first_visible(begin) // self.tile == first_key // self.tile,
                distances=self._distances(keys[None], queries[None]),
            )

    def _distances(self, keys: np.ndarray, queries: np.ndarray) -> torch.Tensor | None:
        if not self.key.has_distances:
            return None
        return torch.from_numpy((keys - queries).astype(np.float32)).to(self.key.device)

    def _row_mask(self, visible: np.ndarray) -> torch.Tensor | None:
        """Of queries (n, L), for each of their heads, and of the rows that they are padded with."""
        rows = np.repeat(visible, self.key.queries_per_kv, axis=0)
        filler = padded_rows(len(rows)) - len(rows)
        return self._mask(np.concatenate([rows, np.ones((filler, rows.shape[1]), bool)]))
