"""Coroutines that are run up to their first wait."""

from __future__ import annotations

import asyncio

import pytest

from octavo.server.begun import begun


class Work:
    """Notes how far it came; waits for each of `gates`."""

    def __init__(self, *gates: asyncio.Event, error: Exception | None = None) -> None:
        self.num_passed = 0
        self.was_cancelled = False
        self._gates = gates
        self._error = error

    async def run(self) -> None:
        try:
            for gate in self._gates:
                await gate.wait()
                self.num_passed += 1
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self._error is not None:
            raise self._error


def opened() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


def test_what_need_not_wait_ends_at_once() -> None:
    async def main() -> None:
        work = Work(opened(), opened())
        assert begun(work.run()) is None
        assert work.num_passed == 2

    asyncio.run(main())


def test_a_task_goes_on_behind_the_first_wait() -> None:
    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        work = Work(opened(), first, second)
        task = begun(work.run())
        assert task is not None
        assert work.num_passed == 1
        first.set()
        await asyncio.sleep(0.01)
        assert work.num_passed == 2
        second.set()
        await asyncio.wait_for(task, 5)
        assert work.num_passed == 3

    asyncio.run(main())


def test_errors_are_raised_where_they_come_up() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="at once"):
            begun(Work(opened(), error=ValueError("at once")).run())
        gate = asyncio.Event()
        task = begun(Work(gate, error=ValueError("later")).run())
        assert task is not None
        gate.set()
        with pytest.raises(ValueError, match="later"):
            await asyncio.wait_for(task, 5)

    asyncio.run(main())


@pytest.mark.parametrize("num_open", [0, 1])
def test_cancelling_reaches_the_coroutine(num_open: int) -> None:
    """At the wait that it began with, and at a later one."""

    async def main() -> None:
        first = asyncio.Event()
        work = Work(first, asyncio.Event())
        task = begun(work.run())
        assert task is not None
        if num_open:
            first.set()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert work.was_cancelled
        assert work.num_passed == num_open

    asyncio.run(main())
