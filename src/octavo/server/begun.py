"""Coroutines that mostly have nothing to wait for."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any


def begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run a coroutine at once, up to its first wait; the task that goes on from there, or None if
    there was no wait.

    Called on the event loop. Python 3.12's eager tasks do the same, and cost a task each time.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.create_task(_finished(coroutine, awaited))


async def _finished(coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _rest(coroutine, awaited)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """What `coroutine` does after the wait that it has begun."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 - cancelled: its turn
            go_on = partial(coroutine.throw, error)
        else:
            go_on = partial(coroutine.send, None)
        try:
            awaited = go_on()
        except StopIteration:
            return
