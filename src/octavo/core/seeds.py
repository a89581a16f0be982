"""Seeds of the sequences of one request, in plain integers."""

from __future__ import annotations

import hashlib


def sequence_seed(seed: int, index: int) -> int:
    """Seed of a request's `index`-th continuation: the request's own for the first, else a 64-bit
    hash of both.

    So a request's first continuation doesn't depend on `n`, and no two continuations share a
    stream.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
