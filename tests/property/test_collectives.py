"""Sums and gathers over ranks are numpy's, with the same bits on all ranks."""

from __future__ import annotations

from functools import reduce

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import ops
from octavo.ops import Array, Group
from octavo.ops.backend import Backend
from support.backends import cpu_backend
from support.ranks import of_its_own, on_ranks


@given(
    ranks=st.integers(2, 4),
    threads=st.integers(1, 2),
    rows=st.lists(st.sampled_from([1, 2, 5, 17, 130, 300]), min_size=1, max_size=4),
    size=st.sampled_from([1, 15, 16, 33, 576, 9000]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(ranks: int, threads: int, rows: list[int], size: int, seed: int) -> None:
    """Steps of one tape, whose numbers of exchanges may be odd; 9000 columns are more than a piece
    of a row, and 300 rows of them many rounds.
    """
    rng = np.random.default_rng(seed)
    columns = tuple(rng.integers(0, 2 * size, ranks).tolist())
    steps = [
        [rng.standard_normal((count, size + columns[rank]), np.float32) for rank in range(ranks)]
        for count in rows
    ]

    def on_rank(backend: Backend, group: Group) -> list[tuple[np.ndarray, np.ndarray]]:
        def forward(x: Array) -> tuple[Array, Array]:
            summed, own = ops.split_columns(x, (size, columns[group.rank]))
            total = ops.add(summed, ops.all_reduce(ops.scale(summed, 1.5), group))
            return total, ops.all_gather(own, group, columns)

        function = backend.compile(forward)
        results = (function(backend.from_host(step[group.rank])) for step in steps)
        return [(backend.to_host(total), backend.to_host(own)) for total, own in results]

    backends = [of_its_own(cpu_backend("native"), threads) for _ in range(ranks)]
    found = on_ranks(backends, on_rank)
    for number, step in enumerate(steps):
        total = reduce(np.add, (x[:, :size] * np.float32(1.5) for x in step))
        together = np.concatenate([x[:, size:] for x in step], axis=1)
        for rank, x in enumerate(step):
            np.testing.assert_array_equal(found[rank][number][0], x[:, :size] + total)
            np.testing.assert_array_equal(found[rank][number][1], together)
