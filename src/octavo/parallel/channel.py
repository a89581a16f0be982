"""Messages between two processes of one machine."""

from __future__ import annotations

import pickle
import socket
from typing import Any

# A message is its size in 8 bytes, little-endian, and a pickle. child.py reads its first one
# without this module.
_SIZE_BYTES = 8
_READ_BYTES = 1 << 16


class Channel:
    """One end of a connected pair of sockets. One thread may send while another receives. All
    methods but `close` raise EOFError when the other end is gone.

    A message is one write, and one read takes all that have come; multiprocessing's Connection
    needs two reads for each, a selector for a look, and a pickler in Python.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
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
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.sendall(len(data).to_bytes(_SIZE_BYTES, "little") + data)
        except OSError as error:
            raise EOFError("the other end is gone") from error

    def receive(self) -> Any:
        """The next message."""
        while (data := self._next()) is None:
            self._read(0)
        return pickle.loads(data)

    def receive_all(self, *, wait: bool) -> list[Any]:
        """The messages that have come; waits for one if asked to."""
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
            messages.append(pickle.loads(data))
        if messages or (end is None and not wait):
            return messages
        if end is not None:
            raise end
        return [self.receive()]

    def _read(self, flags: int) -> int:
        """Take more bytes in; their number."""
        try:
            data = self._socket.recv(_READ_BYTES, flags)
        except ConnectionError:  # it is gone and has not read everything
            data = b""
        if not data:
            raise EOFError("the other end is gone")
        self._unread += data
        return len(data)

    def _next(self) -> bytes | None:
        """The first message that is complete."""
        end = _SIZE_BYTES + int.from_bytes(self._unread[:_SIZE_BYTES], "little")
        if len(self._unread) < end:
            return None
        data = bytes(self._unread[_SIZE_BYTES:end])
        del self._unread[:end]
        return data
