"""Work that takes long leaves the event loop, which all other requests need."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

# Each busy thread makes the event loop wait longer for the interpreter.
_NUM_THREADS = 8


async def offloaded(is_large: bool, work: Callable[[], Result]) -> Result:
    """The result of `work`, done on a thread if that is worth the hop."""
    return await asyncio.wrap_future(_THREADS.submit(work)) if is_large else work()


class _DaemonThreads:
    """Like concurrent.futures' pool (and asyncio.to_thread's), but the process's end does not wait
    for what still runs.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._waiting.put((future, work))
        with self._lock:
            if self._num_threads < _NUM_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._run, name="octavo-text", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            self._run_one(*self._waiting.get())

    def _run_one(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)


_THREADS = _DaemonThreads()
