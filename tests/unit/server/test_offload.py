from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from octavo.server.offload import offloaded


async def thread_of(is_large: bool) -> threading.Thread:
    return await offloaded(is_large, threading.current_thread)


def test_large_work_leaves_the_event_loop() -> None:
    assert asyncio.run(thread_of(False)) is threading.current_thread()
    thread = asyncio.run(thread_of(True))
    assert thread is not threading.current_thread()
    assert thread.daemon


@pytest.mark.parametrize("is_large", [True, False])
def test_errors_come_through(is_large: bool) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        asyncio.run(offloaded(is_large, fail))


def test_cancelled_work_that_has_not_begun_is_left_out() -> None:
    done: list[int] = []
    may_end = threading.Event()

    async def main() -> None:
        running = [asyncio.create_task(offloaded(True, may_end.wait)) for _ in range(20)]
        await asyncio.sleep(0.05)
        late = asyncio.create_task(offloaded(True, lambda: done.append(1)))
        await asyncio.sleep(0.05)
        late.cancel()
        await asyncio.sleep(0.05)
        may_end.set()
        await asyncio.gather(*running)
        await offloaded(True, lambda: done.append(2))

    asyncio.run(main())
    assert done == [2]


def test_the_end_of_the_process_does_not_wait() -> None:
    program = """
import asyncio, time
from octavo.server.offload import offloaded
async def main():
    for _ in range(20):
        asyncio.create_task(offloaded(True, lambda: time.sleep(60)))
    await asyncio.sleep(0.1)
asyncio.run(main())
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
