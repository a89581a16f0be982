"""Arrays from one stage of a pipeline to another, as raw bytes over a socket."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import ml_dtypes
import numpy as np

from octavo.core.errors import InvariantError


class Kind(IntEnum):
    """What a message is."""

    ACTIVATIONS = 1
    DRAFTS = 2
    FAILURE = 3
    """The sender could not compute the step; the bytes are a text that says why."""
    TIMES = 4
    """What the step took."""


class StageFailedError(Exception):
    """Another stage could not compute the step; the text says why."""


class _Header(NamedTuple):
    """dtype: index in _DTYPES. shape: of three axes."""

    kind: int
    dtype: int
    step_id: int
    shape: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


_LAYOUT = Struct("<BBxxxxxxqIII")
_DTYPES = [
    np.dtype(t)
    for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.int64, np.uint8, np.float64)
]
_LONGEST_TEXT = 200
_DISCARDED_BYTES = 1 << 16  # at a time


class Link:
    """One end of a connected stream socket, which carries messages of arrays both ways. One thread
    may send while another receives. All methods but `close` raise EOFError when the other end is
    gone.

    Messages belong to steps, and a receiver says which step it is at. Those of earlier steps, which
    are left over when a step failed on one side, are passed over.

    Nothing is buffered but in the socket: sending waits until the other end reads, and still no two
    stages ever wait for each other. All that happens on the links of an engine has one order, by
    step, then drafts before activations, then by stage, and each stage does its part in this order:
    in step t the last stage sends drafts to all before it, and each of these receives them before
    it computes anything of t; then activations go from the first stage to the second, from there to
    the third. So of all that is waited for, the first in this order has both its ends at hand.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        if end.family in (socket.AF_INET, socket.AF_INET6):
            # A step's last small message must not wait for the acknowledgement of the one before.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._header = bytearray(_LAYOUT.size)

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Both ends, within one machine."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: Kind, step_id: int, arrays: Sequence[np.ndarray]) -> None:
        """arrays: N of them, at least one, of the same shape (R, C) and dtype. Waits while the
        other end is behind; they may change afterwards.
        """
        rows, columns = arrays[0].shape
        dtype = arrays[0].dtype
        if any(array.shape != (rows, columns) or array.dtype != dtype for array in arrays):
            raise InvariantError("a message has arrays of several shapes or dtypes")
        shape = (len(arrays), rows, columns)
        header = _LAYOUT.pack(kind, _DTYPES.index(dtype), step_id, *shape)
        bodies = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        self._send([memoryview(header), *(body.data for body in bodies)])

    def send_failure(self, step_id: int, reason: str) -> None:
        """reason: cut if it is long."""
        text = reason.encode()[:_LONGEST_TEXT]
        self.send(Kind.FAILURE, step_id, [np.frombuffer(text, np.uint8)[np.newaxis]])

    def receive(
        self, kind: Kind, step_id: int, most: tuple[int, int, int], buffer: np.ndarray | None = None
    ) -> np.ndarray:
        """The step's message of a kind: arrays (N, R, C), none of which is more than `most` allows.
        buffer: (bytes,) uint8, in which they are put if it is large enough for `most`.

        Raises StageFailedError if the sender failed instead, and InvariantError for a message that
        should not come now.
        """
        while (header := self._read_header()).step_id < step_id:
            self._discard(header.num_bytes)
        if header.kind == Kind.FAILURE and header.step_id == step_id:
            if header.num_bytes > _LONGEST_TEXT:
                raise InvariantError(f"a stage failed at length: {header.num_bytes} bytes")
            text = np.empty(header.num_bytes, np.uint8)
            self._fill(text.data)
            raise StageFailedError(text.tobytes().decode(errors="replace"))
        is_fit = all(size <= limit for size, limit in zip(header.shape, most, strict=True))
        if header.kind != kind or header.step_id != step_id or not is_fit:
            raise InvariantError(
                f"step {step_id} waits for {kind.name.lower()} of at most {most}, but message "
                f"{header.kind} of step {header.step_id} came, with arrays of {header.shape}"
            )
        num_bytes = header.num_bytes
        if buffer is None or len(buffer) < num_bytes:
            buffer = np.empty(num_bytes, np.uint8)
        body = buffer[:num_bytes]
        self._fill(body.data)
        return body.view(_DTYPES[header.dtype]).reshape(header.shape)

    def _read_header(self) -> _Header:
        self._fill(memoryview(self._header))
        kind, dtype, step_id, *shape = _LAYOUT.unpack(self._header)
        if dtype >= len(_DTYPES):
            raise InvariantError(f"a message has dtype {dtype}, which there isn't")
        return _Header(kind, dtype, step_id, (shape[0], shape[1], shape[2]))

    def _send(self, parts: list[memoryview]) -> None:
        try:
            while parts:
                sent = self._socket.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise EOFError("the other stage is gone") from error

    def _fill(self, memory: memoryview) -> None:
        try:
            while len(memory):
                count = self._socket.recv_into(memory)
                if not count:
                    raise EOFError("the other stage is gone")
                memory = memory[count:]
        except OSError as error:
            raise EOFError("the other stage is gone") from error

    def _discard(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _DISCARDED_BYTES)))
        while num_bytes:
            part = scratch[:num_bytes]
            self._fill(part)
            num_bytes -= len(part)
