"""How far a measurement has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; call what it gives after each part."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """One bar after another on stderr; a line each where that is no terminal. What it gives is
    called with a title and a total, and gives what is called after each part.
    """
    if not sys.stderr.isatty():

        def begin(title: str, total: int) -> Callable[[], None]:
            print(f"{title} ...", file=sys.stderr, flush=True)
            return lambda: None

        yield begin
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def begin_bar(title: str, total: int) -> Callable[[], None]:
            for task in progress.task_ids:
                progress.remove_task(task)
            task = progress.add_task(title, total=total)
            return lambda: progress.advance(task)

        yield begin_bar
