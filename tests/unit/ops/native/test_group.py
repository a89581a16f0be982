"""Groups of ranks that share memory, and what they refuse."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from octavo import ops
from octavo.core.errors import ConfigError, InvariantError
from octavo.ops import Array, Group
from octavo.ops.backend import Backend, GroupOffer
from octavo.ops.native import _native, group
from octavo.ops.native.recorder import Recorded
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import pack_rows
from support.backends import cpu_backend
from support.ranks import HERE, RankProcess, gathered, of_its_own, on_ranks, rank_processes, reduced

KEY = 5


def backends(ranks: int, threads: int = 1) -> list[Backend]:
    return [of_its_own(cpu_backend("native"), threads) for _ in range(ranks)]


def parts(ranks: int, *shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(ranks)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(ranks)]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    with rank_processes("native", 2) as ranks:
        yield ranks


def on_all(processes: list[RankProcess], function: object, *args: list[object]) -> list[np.ndarray]:
    for process, own in zip(processes, zip(*args, strict=True), strict=True):
        process.begin(function, *own)  # type: ignore[arg-type]
    return [process.result() for process in processes]


# --- processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 3000])
def test_processes_add_up(processes: list[RankProcess], rows: int) -> None:
    """3000 rows of 1000 go in twelve rounds."""
    given = parts(2, rows, 1000)
    for actual in on_all(processes, reduced, given):
        np.testing.assert_array_equal(actual, given[0] + given[1])


def test_processes_gather(processes: list[RankProcess]) -> None:
    given = parts(2, 40, 20000)
    given[0] = given[0][:, :123]
    columns = [(123, 20000)] * 2
    for actual in on_all(processes, gathered, given, columns):
        np.testing.assert_array_equal(actual, np.concatenate(given, axis=1))


def test_many_exchanges_of_more_ranks_and_threads_than_processors() -> None:
    """Each sum doubles the last one's, or nearly: with 4 ranks it is fourfold."""
    times = 10
    with rank_processes("native", 4, threads=2) as ranks:
        given = parts(4, 3, 70)
        first = reduce(np.add, given)
        for actual in on_all(ranks, reduced, given, [times] * 4):
            np.testing.assert_array_equal(actual, first * np.float32(4 ** (times - 1)))


def test_a_late_rank_is_waited_for(processes: list[RankProcess]) -> None:
    given = parts(2, 2, 33)
    processes[0].begin(reduced, given[0])
    time.sleep(0.2)
    processes[1].begin(reduced, given[1])
    for process in processes:
        np.testing.assert_array_equal(process.result(), given[0] + given[1])


def test_a_waiting_rank_uses_no_processor(processes: list[RankProcess]) -> None:
    before = _processor_seconds(processes[0].pid)
    given = parts(2, 2, 33)
    processes[0].begin(reduced, given[0])
    time.sleep(0.5)
    assert _processor_seconds(processes[0].pid) - before < 0.1
    processes[1].begin(reduced, given[1])
    for process in processes:
        process.result()


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_exchanges_take_is_counted() -> None:
    """The other rank comes 0.2 s late."""

    def on_rank(backend: Backend, group: Group) -> tuple[float, float]:
        reduce_once = backend.compile(lambda x: ops.all_reduce(ops.relu(x), group))
        if group.rank == 1:
            time.sleep(0.2)
        before = group.seconds
        reduce_once(backend.from_host(np.ones((2, 33), np.float32)))
        return before, group.seconds

    (before, late), (_, short) = on_ranks(backends(2), on_rank)
    assert before == 0
    assert late > 0.15
    assert 0 < short < late


def test_a_group_leaves_nothing_behind(processes: list[RankProcess]) -> None:
    """Not even a name while it lives."""
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "memfd:octavo-group (deleted)" in maps
    assert not [name for name in os.listdir("/dev/shm") if "octavo" in name]


# --- on tapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_exchanges_between_products(threads: int) -> None:
    """A layer whose inner size is divided, its residual, and a head whose outputs are divided: as
    the whole layer computes it, for any number of rows; the head also for none.
    """
    ranks, hidden, inner = 3, 40, 64
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> list[np.ndarray]:
        return [rng.normal(size=shape).astype(np.float32) / 8 for _ in range(ranks)]

    up, down, head = weights(inner, hidden), weights(hidden, inner), weights(33, hidden)
    steps = [
        (rng.normal(size=(rows, hidden)).astype(np.float32), np.arange(wanted))
        for rows, wanted in ((1, 1), (7, 3), (7, 0), (300, 300))
    ]

    def on_rank(backend: Backend, group: Group) -> list[np.ndarray]:
        own_up, own_down, own_head = (
            pack_rows(of_ranks[group.rank], Format("f32")) for of_ranks in (up, down, head)
        )

        def forward(x: Array, wanted: Array) -> Array:
            product = ops.linear(ops.relu(ops.linear(x, own_up)), own_down)
            x = ops.take_rows(ops.add(x, ops.all_reduce(product, group)), wanted)
            return ops.all_gather(ops.linear(x, own_head), group, (33,) * ranks)

        recorded = backend.compile(forward)
        assert isinstance(recorded, Recorded)
        recorded.timed = True
        results = [
            backend.to_host(recorded(backend.from_host(x), backend.from_host(wanted)))
            for x, wanted in steps
        ]
        names = [region.name for region in recorded.region_times()]
        assert names[-4:] == ["all_reduce", "take_rows", "linear 33x40", "all_gather"]
        return results

    found = on_ranks(backends(ranks, threads), on_rank)
    for number, (x, wanted) in enumerate(steps):
        wide = x[wanted].astype(np.float64)
        inner_values = [np.maximum(wide @ matrix.T, 0) for matrix in up]
        y = wide + sum(v @ matrix.T for v, matrix in zip(inner_values, down, strict=True))
        expected = np.concatenate([y @ matrix.T for matrix in head], axis=1)
        np.testing.assert_allclose(found[0][number], expected, rtol=1e-4, atol=1e-4)
        for other in found[1:]:
            np.testing.assert_array_equal(other[number], found[0][number])


def test_a_sum_that_two_want_is_not_fused_with_one() -> None:
    given = parts(2, 5, 24)

    def on_rank(backend: Backend, group: Group) -> list[np.ndarray]:
        def both(x: Array) -> tuple[Array, Array]:
            total = ops.all_reduce(ops.scale(x, 2.0), group)
            return ops.add(x, total), total

        results = backend.compile(both)(backend.from_host(given[group.rank]))
        return [backend.to_host(array) for array in results]

    total = given[0] * np.float32(2) + given[1] * np.float32(2)
    for x, (added, summed) in zip(given, on_ranks(backends(2), on_rank), strict=True):
        np.testing.assert_array_equal(summed, total)
        np.testing.assert_array_equal(added, x + total)


# --- what is refused ---------------------------------------------------------------------------


def test_memory_of_another_group() -> None:
    memory = _native.GroupMemory(2, KEY)
    path = f"/proc/self/fd/{memory.file}"
    with pytest.raises(ValueError, match="the memory of another group"):
        _native.GroupMemory.open(path, 2, KEY + 1)
    with pytest.raises(ValueError, match="not the memory of a group of 3 ranks"):
        _native.GroupMemory.open(path, 3, KEY)
    with pytest.raises(OSError, match="No such file") as missing:
        _native.GroupMemory.open("/proc/self/fd/12345", 2, KEY)
    assert isinstance(missing.value, FileNotFoundError)


def test_a_rank_that_another_has() -> None:
    memory = _native.GroupMemory(2, KEY)
    first = _native.SharedGroup(memory, 1, 1.0)
    with pytest.raises(ValueError, match="another has this rank"):
        _native.SharedGroup(memory, 1, 1.0)
    with pytest.raises(ValueError, match="no such rank"):
        _native.SharedGroup(memory, 2, 1.0)
    del first


def test_ranks_that_never_come() -> None:
    backend = backends(1)[0]
    alone = group.NativeGroup(0, 2, _native.SharedGroup(_native.GroupMemory(2, KEY), 0, 0.1))
    x = backend.from_host(np.ones((1, 8), np.float32))
    with pytest.raises(RuntimeError, match="other ranks of the group have not come for"):
        ops.all_reduce(x, alone)
    with pytest.raises(RuntimeError, match="have lost each other"):
        ops.all_reduce(x, alone)
    later = ops.scale(x, 2.0)  # the threads are as before
    np.testing.assert_array_equal(backend.to_host(later), np.full((1, 8), 2, np.float32))


def test_columns_that_are_not_the_groups() -> None:
    backend = backends(1)[0]
    alone = group.NativeGroup(0, 2, _native.SharedGroup(_native.GroupMemory(2, KEY), 0, 0.1))
    x = backend.from_host(np.ones((1, 8), np.float32))
    with pytest.raises(ValueError, match="the columns of each"):
        ops.all_gather(x, alone, (8,))
    wide = backend.from_host(np.ones((1, (1 << 20) // 4 + 1), np.float32))
    with pytest.raises(ValueError, match="too long"):
        ops.all_reduce(wide, alone)


def test_joining_without_an_offer() -> None:
    with pytest.raises(InvariantError, match="offered nothing"):
        backends(1)[0].join_group(0, 1, [])


def test_an_offer_of_a_process_that_is_gone() -> None:
    own, other = backends(2)
    offers = [own.offer_group(0, 2, HERE), other.offer_group(1, 2, HERE)]
    gone: GroupOffer = offers[0] | {"file": 12345}
    with pytest.raises(ConfigError, match=r"rank 1 can't use rank 0's memory .*start them"):
        other.join_group(1, 2, [gone, offers[1]])
    own.join_group(0, 2, offers)


# --- by Python, as between machines ------------------------------------------------------------


def test_machines_through_torch() -> None:
    """The same bits as through shared memory."""
    given = parts(3, 5, 33)

    def on_rank(backend: Backend, group: Group) -> tuple[np.ndarray, np.ndarray]:
        x = backend.from_host(given[group.rank])
        total = backend.to_host(ops.all_reduce(x, group))
        return total, backend.to_host(ops.all_gather(x, group, (33,) * 3))

    pytest.importorskip("torch")
    for total, together in on_ranks(backends(3, threads=2), on_rank, host="machine "):
        np.testing.assert_array_equal(total, given[0] + given[1] + given[2])
        np.testing.assert_array_equal(together, np.concatenate(given, axis=1))


def test_machines_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "octavo.ops.torch.group", raising=False)
    own = backends(1)[0]
    offers = [own.offer_group(0, 2, HERE), {"host": "another", "address": "192.0.2.1"}]
    with pytest.raises(ConfigError, match=r"several machines, need torch .* 'octavo\[torch\]'"):
        own.join_group(0, 2, offers)


def test_what_fails_in_python_fails_the_step() -> None:
    def refuse(mine: np.ndarray, all_parts: np.ndarray) -> None:
        raise ConnectionError(f"{len(mine)} bytes for {len(all_parts)} ranks")

    backend = backends(1, threads=2)[0]
    failing = group.NativeGroup(1, 2, _native.CalledGroup(1, 2, refuse))
    x = backend.from_host(np.ones((3, 8), np.float32))
    with pytest.raises(ConnectionError, match="192 bytes for 2 ranks"):
        ops.all_reduce(x, failing)
