"""How far a long wait at start has come, on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LoadingBar:
    """Shows the loading of weights; called with bytes done and bytes in all.

    A bar on a terminal, two plain lines elsewhere. Can be sent to another process until its first
    call.
    """

    def __init__(self) -> None:
        self._started: float | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    def __call__(self, num_done: int, num_total: int) -> None:
        if self._started is None:
            self._started = time.monotonic()
            self._start(sys.stderr, num_total)
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=num_done)
        if num_done >= num_total:
            self._end(time.monotonic() - self._started)

    def _start(self, stream: TextIO, num_total: int) -> None:
        if not stream.isatty():
            print("Loading weights", file=stream, flush=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        progress = Progress(
            TextColumn("Loading weights"),
            BarColumn(),
            TaskProgressColumn(),
            console=Console(file=stream),
            transient=True,
        )
        progress.start()
        self._bar = progress, progress.add_task("", total=num_total)

    def _end(self, seconds: float) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        print(f"Loaded weights in {seconds:.1f} s", file=sys.stderr, flush=True)
