"""How processes know of each other's life: a connection on which both send a sign, again and again.

A process that ends closes it. One that is stopped, or whose machine is gone, falls silent.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

_SIGN = b"."
_LAST_WORDS = b"!"
_SIGNS_PER_TIMEOUT = 5
# To come to the first one: a process has to start, which takes long where disks are slow.
_FIRST_SIGN_SECONDS = 60.0
_READ_BYTES = 1 << 16


class Lifeline:
    """A worker's end. The process ends when the other end is gone or silent for `timeout_s`; it may
    take its time to the first sign, since it waits for all workers before it watches them.
    """

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self._socket = end
        self._timeout_s = timeout_s
        self._is_ending = False
        self._thread = threading.Thread(target=self._live, name="octavo-lifeline", daemon=True)
        self._thread.start()

    def say_last(self, words: str) -> None:
        """Why this process will end now, which may take it a while."""
        self._is_ending = True
        with suppress(OSError):
            self._socket.sendall(_LAST_WORDS + words.encode(errors="replace"))
            self._socket.shutdown(socket.SHUT_WR)

    def _live(self) -> None:
        interval = self._timeout_s / _SIGNS_PER_TIMEOUT
        is_watched = False
        num_silent = 0  # intervals, rather than a time: this process may have been stopped, too
        self._socket.settimeout(interval)
        while not self._is_ending:
            try:
                self._socket.sendall(_SIGN)
                if not self._socket.recv(_READ_BYTES):
                    break
                num_silent = 0
                is_watched = True
                time.sleep(interval / 2)
            except TimeoutError:
                num_silent += is_watched
                if num_silent == _SIGNS_PER_TIMEOUT:
                    break
            except OSError:
                break
        if not self._is_ending:
            # Whatever the other threads do: they may wait for ranks that don't answer any more.
            os._exit(1)


class Watch:
    """The other ends. When one of them is gone or silent, `on_loss` is called, once, with its name
    and why; on a thread of its own.
    """

    def __init__(
        self,
        ends: Mapping[str, socket.socket],
        timeout_s: float,
        on_loss: Callable[[str, str], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._on_loss = on_loss
        self._is_over = threading.Event()
        first = time.monotonic() + max(timeout_s, _FIRST_SIGN_SECONDS)
        self._limits = dict.fromkeys(ends, first)  # for the next sign
        self._words = dict.fromkeys(ends, b"")
        self._ends = dict(ends)
        self._selector = selectors.DefaultSelector()
        for name, end in ends.items():
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ, name)
        self._thread = threading.Thread(target=self._watch, name="octavo-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; a call of `on_loss` has returned then, and none follows."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """The same, and close the ends."""
        self.stop()
        self._selector.close()
        for end in self._ends.values():
            end.close()

    def _watch(self) -> None:
        interval = self._timeout_s / _SIGNS_PER_TIMEOUT
        now = told = time.monotonic() - interval
        while not self._is_over.is_set():
            before, now = now, time.monotonic()
            if (pause := now - before) > self._timeout_s / 2:  # it was this one that stood still
                self._limits = {name: limit + pause for name, limit in self._limits.items()}
            if now - told >= interval:
                told = now
                for end in self._ends.values():
                    with suppress(OSError):  # a reader sees why
                        end.send(_SIGN)
            for key, _ in self._selector.select(min(interval, 0.2)):
                if self._is_over.is_set():
                    return
                if not self._listen(key.data):
                    return
            silent = [name for name, limit in self._limits.items() if limit < now]
            if silent and not self._is_over.is_set():
                self._on_loss(silent[0], f"has not answered for {self._timeout_s:g} s")
                return

    def _listen(self, name: str) -> bool:
        """False if it is gone."""
        try:
            heard = self._ends[name].recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            heard = b""
        if heard:
            self._limits[name] = time.monotonic() + self._timeout_s
            self._words[name] += heard.lstrip(_SIGN)
            return True
        words = self._words[name].removeprefix(_LAST_WORDS).decode(errors="replace")
        self._on_loss(name, words)
        return False
