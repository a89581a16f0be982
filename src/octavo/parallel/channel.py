"""Messages between two processes."""

from __future__ import annotations

import io
import pickle
import select
import socket
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from octavo.core.errors import OctavoError

# A message is its size in 8 bytes, little-endian, and a pickle. child.py reads its first one
# without this module.
_SIZE_BYTES = 8
_READ_BYTES = 1 << 16
# Far more than any message has; what says that it is longer is none.
_MOST_BYTES = 1 << 32


Loads = Callable[[bytes], Any]


def packed(message: object) -> bytes:
    """A message as channels send it."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_SIZE_BYTES, "little") + data


def plain_loads(data: bytes) -> Any:
    """A message from another machine: plain data of `octavo` alone. Raises EOFError for anything
    else, since whoever sends that can't be talked to.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # what is broken can raise nearly anything
        raise EOFError(f"the other end sends what it must not: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Makes tuples with names and dataclasses of octavo's plain data, and its errors; nothing else
    can be named. Source: Python's documentation, Restricting Globals.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in _PLAIN_MODULES and "." not in name:
            found = super().find_class(module, name)
            is_own = isinstance(found, type) and found.__module__ == module  # not imported there
            if is_own and (issubclass(found, _PLAIN_TYPES) or is_dataclass(found)):
                return found
        if (module, name) in _PLAIN_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


_PLAIN_MODULES = (
    "octavo.core.errors",
    "octavo.core.request",
    "octavo.core.sampling_params",
    "octavo.core.step",
    "octavo.executor.messages",
    "octavo.executor.nodes",
    "octavo.executor.remote_workers",
)
_PLAIN_TYPES = (tuple, OctavoError)
_PLAIN_NAMES = (("builtins", "frozenset"), ("builtins", "set"))


class Channel:
    """One end of a connected pair of sockets. One thread may send while another receives. All
    methods but `close` raise EOFError when the other end is gone.

    A message is one write, and one read takes all that have come; multiprocessing's Connection
    needs two reads for each, a selector for a look, and a pickler in Python.
    """

    def __init__(self, end: socket.socket, loads: Loads = pickle.loads) -> None:
        """loads: makes a message of its bytes. Only children of this process are believed to send
        pickles that do no harm; see `plain_loads` for others.
        """
        self._socket = end
        self._loads = loads
        self._unread = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: object) -> None:
        """Waits while the other end is far behind."""
        self.send_packed(packed(message))

    def send_packed(self, message: bytes) -> None:
        """What `packed` gives; one message for several channels."""
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise EOFError("the other end is gone") from error

    def receive(self) -> Any:
        """The next message."""
        while (data := self._next()) is None:
            self._read(0)
        return self._loads(data)

    def receive_all(self, *, wait: bool, timeout_s: float | None = None) -> list[Any]:
        """The messages that have come; waits for one if asked to, but no longer than `timeout_s`
        for its beginning.
        """
        end: EOFError | None = None
        try:
            while self._read(socket.MSG_DONTWAIT) == _READ_BYTES:
                pass
        except BlockingIOError:
            pass
        except EOFError as error:  # what came before it is still to be taken
            end = error
        messages = []
        while (data := self._next()) is not None:
            messages.append(self._loads(data))
        if messages or (end is None and not wait):
            return messages
        if end is not None:
            raise end
        if timeout_s is not None and not self._begins_within(timeout_s):
            return []
        return [self.receive()]

    def _begins_within(self, timeout_s: float) -> bool:
        poll = select.poll()  # unlike select, it takes any file descriptor
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _read(self, flags: int) -> int:
        """Take more bytes in; their number."""
        try:
            data = self._socket.recv(_READ_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:  # it is gone and has not read everything; or this end has been closed
            data = b""
        if not data:
            raise EOFError("the other end is gone")
        self._unread += data
        return len(data)

    def _next(self) -> bytes | None:
        """The first message that is complete."""
        end = _SIZE_BYTES + int.from_bytes(self._unread[:_SIZE_BYTES], "little")
        if len(self._unread) < end:
            if end > _MOST_BYTES and len(self._unread) >= _SIZE_BYTES:
                raise EOFError(f"the other end sends what is no message: {end} bytes")
            return None
        data = bytes(self._unread[_SIZE_BYTES:end])
        del self._unread[:end]
        return data
