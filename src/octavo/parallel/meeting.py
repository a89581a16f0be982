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
_MAX_HELLO_BYTES = 4096
# To say who one is, for a peer that is there.
_HANDSHAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.2


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def accept(self, timeout_s: float) -> tuple[socket.socket, Any] | None:
        """The next one who joins and has the key, with what it says of itself; None if there was
        none in that time. Those without the key are sent away.
        """
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                joined, (host, *_) = self._socket.accept()
            except TimeoutError:
                return None
            hello = _let_in(joined, self._key)
            if hello is not None:
                return joined, hello
            logger.warning("%s tried to join without the key", host)
            joined.close()
        return None

    def close(self) -> None:
        self._socket.close()


def join(address: Address, key: bytes, hello: Any, *, timeout_s: float) -> socket.socket:
    """Connect to a `Meeting`, which may begin to listen only later. hello: JSON. Raises ConfigError
    if there is none in that time, or if it has another key.
    """
    end = time.monotonic() + timeout_s
    while True:
        problem = "nothing listens there"
        with suppress(OSError):
            connected = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
            if _enter(connected, key, hello):
                return connected
            connected.close()
            problem = "it has another --cluster-key"
        if time.monotonic() > end:
            raise ConfigError(
                f"can't join {address[0]}:{address[1]}: {problem}; start the machine of --node-rank"
                " 0 with this --master-addr and --master-port, and the same --cluster-key"
            )
        time.sleep(_RETRY_SECONDS)


def _let_in(joined: socket.socket, key: bytes) -> Any:
    """The hello of someone who has the key; None for anyone else."""
    _prepare(joined)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        joined.sendall(nonce)
        head = _exactly(joined, _NONCE_BYTES + _DIGEST_BYTES + 2)
        theirs, proof = head[:_NONCE_BYTES], head[_NONCE_BYTES:-2]
        size = int.from_bytes(head[-2:], "little")
        if size > _MAX_HELLO_BYTES:
            return None
        hello = _exactly(joined, size)
        if not hmac.compare_digest(proof, _proof(key, b"joins", nonce + hello)):
            return None
        joined.sendall(_proof(key, b"listens", theirs))
        said = json.loads(hello)
    except (OSError, EOFError, ValueError):
        return None
    joined.settimeout(None)
    return said


def _enter(connected: socket.socket, key: bytes, hello: Any) -> bool:
    """Whether the other side has the key, too."""
    _prepare(connected)
    said = json.dumps(hello).encode()
    mine = secrets.token_bytes(_NONCE_BYTES)
    try:
        nonce = _exactly(connected, _NONCE_BYTES)
        size = len(said).to_bytes(2, "little")
        connected.sendall(mine + _proof(key, b"joins", nonce + said) + size + said)
        proof = _exactly(connected, _DIGEST_BYTES)
    except (OSError, EOFError):
        return False
    connected.settimeout(None)
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
