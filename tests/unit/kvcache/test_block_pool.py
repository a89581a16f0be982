from __future__ import annotations

import pytest

from octavo.core.errors import InvariantError
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.prefix_index import block_key, root_key

ROOT = root_key("")


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.usage == 1.0


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.share(blocks)
    assert pool.num_holders(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_holders(blocks[0]) == 1
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_double_release_and_sharing_of_free_blocks_are_bugs() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(InvariantError):
        pool.release(blocks)
    with pytest.raises(InvariantError):
        pool.share(blocks)


def test_a_freed_prefix_can_be_found_until_its_block_is_needed() -> None:
    pool = BlockPool(3)
    key = block_key(ROOT, [1, 2])
    (block,) = pool.allocate(1) or []
    pool.register(block, key)
    pool.release([block])
    assert pool.find_prefix([key]) == [block]
    assert pool.num_holders(block) == 0
    assert block not in (pool.allocate(2) or []), "blocks without a prefix go first"
    assert pool.allocate(1) == [block]
    assert pool.find_prefix([key]) == []


def test_the_end_of_a_prefix_is_given_up_before_its_beginning() -> None:
    pool = BlockPool(3)
    keys = [ROOT]
    for tokens in ([1], [2], [3]):
        keys.append(block_key(keys[-1], tokens))
    table = pool.allocate(3) or []
    for block, key in zip(table, keys[1:], strict=True):
        pool.register(block, key)
    pool.release(table)
    pool.allocate(1)
    assert pool.find_prefix(keys[1:]) == table[:2]


def test_sharing_a_cached_block_takes_it_from_the_free_ones() -> None:
    pool = BlockPool(2)
    key = block_key(ROOT, [1])
    table = pool.allocate(1) or []
    pool.register(table[0], key)
    pool.release(table)
    pool.share(pool.find_prefix([key]))
    assert pool.num_free == 1
    pool.release(table)
    assert pool.num_free == 2


def test_the_first_block_under_a_key_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    key = block_key(ROOT, [1])
    pool.register(first, key)
    pool.register(second, key)
    assert pool.find_prefix([key]) == [first]
    pool.release([second])
    assert pool.allocate(1) == [second]
    assert pool.find_prefix([key]) == [first]


def test_keys_depend_on_everything_before() -> None:
    assert block_key(ROOT, [1, 2]) != block_key(root_key("salt"), [1, 2])
    assert block_key(block_key(ROOT, [1]), [2]) != block_key(block_key(ROOT, [3]), [2])
    assert block_key(ROOT, [1, 2]) != block_key(ROOT, [2, 1])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(1, enable_prefix_caching=False)
    (block,) = pool.allocate(1) or []
    pool.register(block, block_key(ROOT, [1]))
    assert pool.find_prefix([block_key(ROOT, [1])]) == []


def test_forgotten_prefixes_stay_held() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.register(block, block_key(ROOT, [1]))
    pool.forget_prefixes()
    assert pool.find_prefix([block_key(ROOT, [1])]) == []
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1
