"""How long ranks of one machine take to add up what a step has.

    python benchmarks/collectives.py [--ranks 2] [--shapes 1x576,16x4096] [--quick] [--json]

Each rank is a process with one thread, on a CPU of its own as far as there are so many. Timed are
the all_reduce of the native backend, as a part of a recorded step; gloo's through torch, if torch
is there; and a copy of the same bytes. The target is two copies and 20 microseconds: less than a
decode step's products take even for a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from octavo import ops
from octavo.ops.array import Array
from octavo.ops.backend import load_backend
from octavo.parallel.channel import Channel
from octavo.parallel.child import Child

SHAPES = "1x576,8x576,16x576,1x4096,8x4096,16x4096,512x576,512x4096"
IN_A_STEP = 20
"""Sums one after another in the step that is timed."""


@dataclass(frozen=True)
class Row:
    """Microseconds: the median, and of sums also the ninth of ten. gloo: None without torch."""

    rows: int
    columns: int
    copy_us: float
    target_us: float
    octavo_us: float
    octavo_p90_us: float
    gloo_us: float | None
    gloo_p90_us: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns, several with commas")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    steps = 10 if args.quick else 100

    if not args.json:
        print(f"{args.ranks} ranks of one thread each; microseconds")
        print("   shape       KiB    copy  target  octavo     p90    gloo     p90")
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("collectives", name=f"rank {rank}"))
            for rank in range(args.ranks)
        ]
        for rank, child in enumerate(children):
            child.channel.send((rank, args.ranks))
        for _ in range(1 if find_spec("torch") is None else 2):
            offers = [child.channel.receive() for child in children]
            for child in children:
                child.channel.send(offers)
        for shape in args.shapes.split(","):
            rows, columns = map(int, shape.split("x"))
            for child in children:
                child.channel.send((rows, columns, steps))
            row = [child.channel.receive() for child in children][0]  # noqa: RUF015  (all are to be read)
            print(json.dumps(asdict(row)) if args.json else _line(row), flush=True)


def _line(row: Row) -> str:
    figures = [row.copy_us, row.target_us, row.octavo_us, row.octavo_p90_us]
    figures += [] if row.gloo_us is None else [row.gloo_us, row.gloo_p90_us]
    kib = row.rows * row.columns * 4 / 1024
    shape = f"{row.rows}x{row.columns}"
    return f"{shape:>9} {kib:8.1f}" + "".join(f"{figure:8.1f}" for figure in figures)


# --- in a rank's process -----------------------------------------------------------------------


def run(end: socket.socket) -> None:
    channel = Channel(end)
    rank, size = channel.receive()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})

    def joined(name: str) -> tuple[Any, Any]:
        backend = load_backend(name, device="cpu", threads=1)
        backend.choose("float32", {})
        channel.send(backend.offer_group(rank, size))
        return backend, backend.join_group(rank, size, channel.receive())

    native, group = joined("native")
    gloo = joined("torch")[1].process_group if find_spec("torch") is not None else None
    while True:
        try:
            rows, columns, steps = channel.receive()
        except EOFError:
            return
        x = np.zeros((rows, columns), np.float32)
        copy = _copies(x, steps)
        own = _sums(native, group, x, steps)
        others = None if gloo is None else _gloo_sums(gloo, x, steps)
        channel.send(
            Row(
                rows,
                columns,
                copy_us=statistics.median(copy),
                target_us=2 * statistics.median(copy) + 20,
                octavo_us=statistics.median(own),
                octavo_p90_us=_p90(own),
                gloo_us=None if others is None else statistics.median(others),
                gloo_p90_us=None if others is None else _p90(others),
            )
        )


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def _timed(function: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each call, but the first ones'."""
    found = []
    for number in range(count + IN_A_STEP):
        start = time.perf_counter()
        function()
        if number >= IN_A_STEP:
            found.append(1e6 * (time.perf_counter() - start))
    return found


def _copies(x: np.ndarray, steps: int) -> list[float]:
    target = np.empty_like(x)
    return _timed(lambda: np.copyto(target, x), steps * IN_A_STEP)


def _sums(backend: Any, group: ops.Group, x: np.ndarray, steps: int) -> list[float]:
    def sums(x: Array) -> Array:
        for _ in range(IN_A_STEP):
            x = ops.all_reduce(x, group)
        return x

    recorded = backend.compile(sums)
    recorded.timed = True
    given, found = backend.from_host(x), []
    for step in range(steps + 2):
        recorded(given)
        # The first of a step waits for the other rank's Python.
        if step >= 2:
            found += [region.nanoseconds / 1e3 for region in recorded.region_times()[1:]]
    return found


def _gloo_sums(process_group: Any, x: np.ndarray, steps: int) -> list[float]:
    import torch

    tensor = torch.from_numpy(x)
    return _timed(lambda: process_group.allreduce([tensor]).wait(), steps * IN_A_STEP)


if __name__ == "__main__":
    main()
