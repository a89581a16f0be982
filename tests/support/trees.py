"""Trees of drafts, written as the parent of each row: `TREES`, and batches that have some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ops.batch import HostBatch


def _random_tree(rows: int, *, seed: int) -> list[int]:
    """Parents before their children, otherwise in any order of depth."""
    rng = np.random.default_rng(seed)
    return [-1, *(int(rng.integers(max(0, row - 6), row)) for row in range(1, rows))]


TREES = {
    "a chain": [-1, 0, 1, 2, 3],
    "two guesses": [-1, 0, 0],
    "by depth": [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 8, 10],
    "by branches": [-1, 0, 1, 2, 3, 1, 5, 6, 0, 8, 9, 10, 9],
    "a late branch": [*range(-1, 20), 18, 21],
    "64 rows": _random_tree(64, seed=1),
}
"""Row numbers within the tree; -1 is nobody's."""


def path_of(parents: Sequence[int], row: int) -> list[int]:
    """From the first row to this one."""
    path = [row]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path[::-1]


def leaves_of(parents: Sequence[int]) -> list[int]:
    return sorted(set(range(len(parents))) - set(parents))


def with_trees(host: HostBatch, trees: Sequence[Sequence[int] | None]) -> HostBatch:
    """The batch with these trees in place of sequences' own rows; None leaves a chain."""
    parents = np.arange(-1, len(host.positions) - 1, dtype=np.int32)
    positions = host.positions.copy()
    starts = host.query_starts.tolist()
    for start, stop, tree in zip(starts, starts[1:], trees, strict=False):
        if tree is None:
            continue
        assert len(tree) == stop - start
        for row in range(1, len(tree)):
            parents[start + row] = start + tree[row]
            positions[start + row] = positions[start + tree[row]] + 1
    return host._replace(parents=parents, positions=positions)
