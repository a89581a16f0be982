"""A process for an engine, as its parent sees it; child_main.py is what runs in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from octavo.parallel.child import Child


class EngineChild(Child):
    """A child process in which one engine can be built.

    Started before it is known what to build, it loads modules meanwhile.
    """

    def __init__(self, warm_up: Callable[[], object] | None = None) -> None:
        """warm_up: called at once in the child, so it must be picklable."""
        super().__init__("octavo.engine.child_main", name="octavo-engine")
        with suppress(EOFError):
            self.channel.send(warm_up)

    def begin(self, build: Callable[[], object]) -> None:
        """Build this now. What comes of it, facts or a ConfigError, comes over the channel; what
        goes wrong before that shows as its end.
        """
        with suppress(EOFError):
            self.channel.send(build)
