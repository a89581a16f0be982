"""The one authority over KV blocks: who holds them, which are free, which free ones still hold a
prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from octavo.core.errors import InvariantError
from octavo.kvcache.prefix_index import BlockKey, PrefixIndex


class BlockPool:
    """`num_blocks` blocks with reference counts.

    A block without holders is free. If it is registered in the prefix index it can be found and
    shared again until it
    is needed for something else: free blocks are handed out in the order in which they became free,
    those without a prefix first. Every operation succeeds or changes nothing.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, those that still hold a prefix included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with holders."""
        return self.num_blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one holder each; None, and nothing changed, if there are fewer."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._index.discard(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One holder more for each block, which is held already or was found by `find_prefix`."""
        for block in blocks:
            if self._holders[block] == 0:
                if block not in self._index:
                    raise InvariantError(f"block {block} is shared but neither held nor cached")
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block. blocks: in the order of their block table.

        The last ones are freed first, so that of a cached prefix the end is given up before its
        beginning.
        """
        for block in reversed(blocks):
            count = self._holders[block] - 1
            if count < 0:
                raise InvariantError(f"block {block} is released by nobody's holder")
            self._holders[block] = count
            if count == 0:
                self._free[block] = None
                if block not in self._index:
                    self._free.move_to_end(block, last=False)

    def num_holders(self, block: int) -> int:
        return self._holders[block]

    def register(self, block: int, key: BlockKey) -> None:
        """Make a full, held block findable under its prefix key."""
        if self.enable_prefix_caching:
            self._index.add(key, block)

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks of the longest cached prefix. They stay where they are until `share`."""
        found: list[int] = []
        for key in keys:
            block = self._index.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def forget_prefixes(self) -> None:
        """No block can be found any more; held blocks stay held."""
        self._index.clear()
