"""Which full blocks hold which prefix.

A block's key hashes its own tokens and the key of the block before it, so equal keys mean equal
whole prefixes. The chain starts from a root made of everything else that keys and values depend on
(a salt, an adapter). The hash is
cryptographic because prompts come from strangers: a crafted collision would show one client
another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockKey = bytes

_DIGEST_BYTES = 16


def root_key(cache_salt: str) -> BlockKey:
    """The key before the first block."""
    return blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_key(previous: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of the block that holds `token_ids` and follows the block with key `previous`."""
    return blake2b(previous + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class PrefixIndex:
    """A one-to-one map of keys and blocks: the first block registered under a key keeps it."""

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def find(self, key: BlockKey) -> int | None:
        return self._block_of.get(key)

    def add(self, key: BlockKey, block: int) -> None:
        """Register a block, unless it has a key or the key has a block."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def discard(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def clear(self) -> None:
        self._block_of.clear()
        self._key_of.clear()
