"""How processes on several machines find each other: one listens, the others join by address.

Both sides prove that they have the same key before either believes the other (an HMAC of what the
other made up; Source: RFC 2104). What is said then is not secret: the network between the machines
must be trusted with prompts and texts.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import selectors
import socket
import time
from contextlib import suppress
from typing import Any, Self

from octavo.core.errors import ConfigError

logger = logging.getLogger("octavo")

Address = tuple[str, int]

_NONCE_BYTES = 32
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_HEAD_BYTES = _NONCE_BYTES + _DIGEST_BYTES + 2
_MAX_HELLO_BYTES = 4096
# To say who one is, for a peer that is there.
_HANDSHAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.2
# A meeting that ends sends those away who were about to join; one that does so again and again has
# another key.
_MOST_REFUSALS = 5
# Who has connected and said nothing yet; any more and the first ones have to go.
_MOST_STRANGERS = 128


class Meeting:
    """The side that listens. address: where others join, with the port that was taken."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        """port: 0 takes a free one. Raises ConfigError if it can't be listened on."""
        self._key = key
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host}:{port} ({error.strerror}); give an address of this"
                " machine with --master-addr, and a free port with --master-port"
            ) from None
        self.address: Address = (host, self._socket.getsockname()[1])
        self._socket.setblocking(False)
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def accept(self, timeout_s: float) -> tuple[socket.socket, Any] | None:
        """The next one who joins and has the key, with what it says of itself; None if there was
        none in that time. Those without the key are sent away; who says nothing keeps nobody
        waiting.
        """
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, _HANDSHAKE_SECONDS)):
                if key.fileobj is self._socket:
                    self._greet()
                elif key.data in self._strangers and (came := self._hear(key.data)) is not None:
                    return came
            now = time.monotonic()
            for stranger in [one for one in self._strangers.values() if one.limit < now]:
                self._send_away(stranger)
        return None

    def close(self) -> None:
        for stranger in self._strangers.values():
            stranger.connection.close()
        self._strangers.clear()
        self._selector.close()
        self._socket.close()

    def _greet(self) -> None:
        """Someone has connected."""
        try:
            connection, (host, *_) = self._socket.accept()
        except OSError:  # and is gone
            return
        _prepare(connection)
        connection.setblocking(False)
        if len(self._strangers) == _MOST_STRANGERS:
            self._send_away(next(iter(self._strangers.values())))
        self._strangers[connection] = stranger = _Stranger(connection, str(host))
        self._selector.register(connection, selectors.EVENT_READ, connection)
        with suppress(OSError):  # who is gone is noticed when it is heard
            connection.sendall(stranger.nonce)

    def _hear(self, connection: socket.socket) -> tuple[socket.socket, Any] | None:
        """Take what has come; the connection and the hello if the key has been shown."""
        stranger = self._strangers[connection]
        try:
            is_there = stranger.read()
        except BlockingIOError:
            return None
        except OSError:
            is_there = False
        if is_there and not stranger.has_said_all:
            return None
        hello = stranger.hello(self._key) if is_there else None
        if hello is None:
            self._send_away(stranger)
            return None
        self._forget(stranger)
        connection.setblocking(True)
        return connection, hello

    def _send_away(self, stranger: _Stranger) -> None:
        logger.warning("%s tried to join without the key", stranger.host)
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)


class _Stranger:
    """Someone who has connected, and what was said until now. limit: when to have said all."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection = connection
        self.host = host
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.limit = time.monotonic() + _HANDSHAKE_SECONDS
        self._said = bytearray()

    def read(self) -> bool:
        """Take what has come, and no more than belongs to the hello; False at the end, or for a
        hello that is too long.
        """
        part = self.connection.recv(self._num_missing)
        self._said += part
        return bool(part) and self._hello_bytes <= _MAX_HELLO_BYTES

    @property
    def has_said_all(self) -> bool:
        return len(self._said) >= _HEAD_BYTES and self._num_missing == 0

    def hello(self, key: bytes) -> Any:
        """What it says of itself; None if it doesn't show that it has the key."""
        theirs = bytes(self._said[:_NONCE_BYTES])
        proof = bytes(self._said[_NONCE_BYTES : _HEAD_BYTES - 2])
        said = bytes(self._said[_HEAD_BYTES:])
        if not hmac.compare_digest(proof, _proof(key, b"joins", self.nonce + said)):
            return None
        try:
            self.connection.sendall(_proof(key, b"listens", theirs))
            return json.loads(said)
        except (OSError, ValueError, RecursionError):
            return None

    @property
    def _hello_bytes(self) -> int:
        """0 while that isn't known."""
        return int.from_bytes(self._said[_HEAD_BYTES - 2 : _HEAD_BYTES], "little")

    @property
    def _num_missing(self) -> int:
        if len(self._said) < _HEAD_BYTES:
            return _HEAD_BYTES - len(self._said)
        return _HEAD_BYTES + self._hello_bytes - len(self._said)


def join(address: Address, key: bytes, hello: Any, *, timeout_s: float) -> socket.socket:
    """Connect to a `Meeting`, which may begin to listen only later. hello: JSON, but not null.
    Raises ConfigError if there is none in that time, or if it has another key.
    """
    end = time.monotonic() + timeout_s
    num_refusals = 0
    while True:
        problem = "nothing listens there"
        with suppress(OSError, EOFError):
            connected = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
            try:
                problem = "it does not answer"
                _prepare(connected)
                nonce = _exactly(connected, _NONCE_BYTES)
                if _enter(connected, nonce, key, hello):
                    connected.settimeout(None)
                    return connected
                num_refusals += 1
                problem = "it has another --cluster-key"
            except BaseException:
                connected.close()
                raise
            connected.close()
        if time.monotonic() > end or num_refusals == _MOST_REFUSALS:
            raise ConfigError(
                f"can't join {address[0]}:{address[1]}: {problem}; start the machine of --node-rank"
                " 0 with this --master-addr and --master-port, and the same --cluster-key"
            )
        time.sleep(_RETRY_SECONDS)


def _enter(connected: socket.socket, nonce: bytes, key: bytes, hello: Any) -> bool:
    """Whether the other side, which made up the nonce, lets us in, and has the key, too. Raises
    TimeoutError.
    """
    said = json.dumps(hello).encode()
    mine = secrets.token_bytes(_NONCE_BYTES)
    size = len(said).to_bytes(2, "little")
    try:
        connected.sendall(mine + _proof(key, b"joins", nonce + said) + size + said)
        proof = _exactly(connected, _DIGEST_BYTES)
    except (ConnectionError, EOFError):
        return False
    return hmac.compare_digest(proof, _proof(key, b"listens", mine))


def _prepare(connected: socket.socket) -> None:
    connected.settimeout(_HANDSHAKE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages are complete
    # Who waits for a machine that is gone without a word is told within about 15 s.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _proof(key: bytes, side: bytes, text: bytes) -> bytes:
    return hmac.digest(key, side + text, _DIGEST)


def _exactly(connected: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connected.recv(size - len(parts))
        if not part:
            raise EOFError("the other end is gone")
        parts += part
    return bytes(parts)
