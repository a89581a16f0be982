"""Server-sent events from bytes, however the network cut them."""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventDecoder:
    """The data of each event (WHATWG HTML, 9.2.6), as bytes: what is cut is joined before it is
    decoded. Lines end in LF, CR or CRLF; comments and other fields than data are passed over.
    """

    def __init__(self) -> None:
        self._partial = b""  # a line without its end
        self._data: list[bytes] = []  # of the event so far
        self._is_after_cr = False
        self._is_at_start = True

    def feed(self, read: bytes) -> list[bytes]:
        """The events that end within `read`."""
        if self._is_after_cr and read.startswith(b"\n"):
            read = read[1:]  # the second half of a CRLF
            self._is_after_cr = False
        if not read:
            return []
        self._is_after_cr = read.endswith(b"\r")
        if b"\r" in read:
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._partial + read).split(b"\n")
        self._partial = lines.pop()
        events = []
        for line in lines:
            if self._is_at_start:
                self._is_at_start = False
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The event that the end of the stream cut off, if any. A browser drops it; servers exist
        that close right after their last one.
        """
        self._is_after_cr = False
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
