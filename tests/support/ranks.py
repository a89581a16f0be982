"""Groups of ranks: threads of the test's process, or processes of their own."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np

from octavo import ops
from octavo.ops import Group
from octavo.ops.backend import Backend, load_backend
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.runtime import Runtime
from octavo.parallel.channel import Channel
from octavo.parallel.child import Child

T = TypeVar("T")
HERE = "127.0.0.1"


def of_its_own(backend: Backend, threads: int = 1) -> Backend:
    """The same kernels on other threads: ranks of one process wait for each other."""
    if not isinstance(backend, NativeBackend):
        return backend
    own = copy.copy(backend)
    own.runtime = Runtime(threads)
    own.runtime.kernels = backend.runtime.kernels
    return own


def on_ranks(
    backends: Sequence[Backend], function: Callable[[Backend, Group], T], host: str | None = None
) -> list[T]:
    """What `function` returns on each rank, a thread for each. host: in whose place ranks stand for
    machines of their own.
    """
    size = len(backends)
    offers = [backend.offer_group(rank, size, HERE) for rank, backend in enumerate(backends)]
    if host is not None:
        for rank, offer in enumerate(offers):
            offer["host"] = f"{host}{rank}"

    def on_rank(rank: int) -> T:
        return function(backends[rank], backends[rank].join_group(rank, size, offers))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


# --- processes ---------------------------------------------------------------------------------


class RankProcess:
    """A rank in a process of its own."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """function: of a module that the child can import; given a `Rank`."""
        self._child.channel.send((function, args))

    def result(self) -> Any:
        """Raises EOFError if the function has failed, which ends the process."""
        return self._child.channel.receive()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.result()


class Rank:
    """What a child has."""

    backend: Backend
    group: Group


@contextmanager
def rank_processes(backend: str, size: int, threads: int = 1) -> Iterator[list[RankProcess]]:
    """Joined."""
    with ExitStack() as stack:
        ranks = [
            RankProcess(stack.enter_context(Child("support.ranks", name=f"rank {rank}")))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.begin(load, backend, threads)
        for rank in ranks:
            rank.result()
        offers = [rank.call(offer, number, size) for number, rank in enumerate(ranks)]
        for number, rank in enumerate(ranks):
            rank.begin(join, number, size, offers)
        for rank in ranks:
            rank.result()
        yield ranks


def run(end: socket.socket) -> None:
    """In the child, until the channel ends."""
    channel, rank = Channel(end), Rank()
    while True:
        try:
            function, args = channel.receive()
        except EOFError:
            return
        channel.send(function(rank, *args))


def load(rank: Rank, backend: str, threads: int) -> None:
    rank.backend = load_backend(backend, device="cpu", threads=1)
    rank.backend.choose("float32", {})
    rank.backend = of_its_own(rank.backend, threads)


def offer(rank: Rank, number: int, size: int) -> Any:
    return rank.backend.offer_group(number, size, HERE)


def join(rank: Rank, number: int, size: int, offers: Any) -> None:
    rank.group = rank.backend.join_group(number, size, offers)


def reduced(rank: Rank, x: np.ndarray, times: int = 1) -> np.ndarray:
    """The sum, and sums of that."""
    total: Any = rank.backend.from_host(x)
    for _ in range(times):
        total = ops.all_reduce(total, rank.group)
    return rank.backend.to_host(total)


def gathered(rank: Rank, x: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    return rank.backend.to_host(ops.all_gather(rank.backend.from_host(x), rank.group, columns))
