"""Which replica knows how a prompt begins: by the bytes of requests, before anyone tokenizes them.

A replica's own prefix cache goes by tokens. To send a request where most of its prompt was seen,
it is enough that equal beginnings are told from others: a body is cut into pieces from where the
prompt begins, and each piece is known by a hash of all bytes up to its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

_PIECE_BYTES = 256  # some 4 blocks of 16 tokens
_MAX_PIECES = 64  # beyond 16 KiB that are alike, requests hardly ever go different ways
_BEGINNINGS = (b'"messages"', b'"prompt"')

R = TypeVar("R")


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """One key for each whole piece of the prompt in a request's body (JSON): two prompts share a
    key if they are the same up to the end of that piece, as they were written. Settings that come
    before the prompt don't count.
    """
    found = [place for name in _BEGINNINGS if (place := body.find(name)) >= 0]
    first = min(found, default=len(body))
    last = min(len(body), first + _MAX_PIECES * _PIECE_BYTES)
    hashed = hashlib.blake2b(digest_size=16)
    keys = []
    for end in range(first + _PIECE_BYTES, last + 1, _PIECE_BYTES):
        hashed.update(body[end - _PIECE_BYTES : end])
        keys.append(hashed.digest())
    return tuple(keys)


class PrefixMemory(Generic[R]):
    """Which of some replicas `R` has seen which prefix last, of the latest prefixes."""

    def __init__(self, capacity: int = 100_000) -> None:
        """capacity: keys that are remembered, of some 200 bytes each."""
        self._capacity = capacity
        self._replicas: OrderedDict[bytes, R] = OrderedDict()

    def longest(self, keys: Sequence[bytes], among: Collection[R]) -> R | None:
        """The replica that has seen the most of it."""
        for key in reversed(keys):
            replica = self._replicas.get(key)
            if replica is not None and replica in among:
                return replica
        return None

    def note(self, keys: Sequence[bytes], replica: R) -> None:
        """It is going to see all of this."""
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def forget(self, replica: R) -> None:
        """It is gone, and its cache with it."""
        for key in [key for key, known in self._replicas.items() if known == replica]:
            del self._replicas[key]
