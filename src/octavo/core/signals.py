"""What a process does when it is told to end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Unless somebody handles it already, SIGTERM raises SystemExit, which blocks are left by; by
    default the process would end at once, with what it started running on and what it wrote half
    done.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
