from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.kvcache.sizing import KVDecision, decide_num_blocks

MAX_POSITION = 512
TOKEN_BYTES = 1024
MIB = 2**20


def decide(**changes: Any) -> KVDecision:
    arguments: dict[str, Any] = {
        "block_size": 16,
        "block_bytes": 16 * TOKEN_BYTES,
        "kv_cache_memory_bytes": None,
        "free_memory_bytes": 1024 * MIB,
        "memory_share": 0.5,
        "max_num_seqs": 8,
        "max_model_len": 256,
    }
    return decide_num_blocks(MAX_POSITION, **(arguments | changes))


def test_takes_no_more_than_all_sequences_can_fill() -> None:
    decision = decide()
    assert decision.num_blocks == 8 * 16
    assert decision.num_bytes == 8 * 256 * TOKEN_BYTES
    assert decision.max_model_len == 256
    assert decision.reason == (
        "128 blocks of 16 tokens, 2.0 MiB: all that 8 sequences can use, "
        "within 50% of 1024.0 MiB free memory"
    )


def test_takes_its_share_of_the_free_memory() -> None:
    decision = decide(free_memory_bytes=2 * MIB)
    assert decision.num_blocks == MIB // (16 * TOKEN_BYTES)
    assert decision.reason.endswith("50% of 2.0 MiB free memory")


def test_explicit_bytes_win() -> None:
    decision = decide(kv_cache_memory_bytes=16 * MIB, free_memory_bytes=17 * MIB)
    assert decision.num_blocks == 16 * MIB // (16 * TOKEN_BYTES)
    assert decision.reason.endswith("16.0 MiB: set by --kv-cache-memory-bytes")


def test_explicit_bytes_that_are_not_free_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"16\.0 MiB, but only 1\.0 MiB are free beside the wei"):
        decide(kv_cache_memory_bytes=16 * MIB, free_memory_bytes=MIB)


def test_a_model_length_that_is_no_multiple_of_the_block_needs_whole_blocks() -> None:
    assert decide(max_model_len=250).num_blocks == decide(max_model_len=256).num_blocks


def test_too_little_memory_names_both_figures_and_a_length_that_works() -> None:
    # CFG-05: room for 100 tokens, 256 asked for.
    budget = 100 * TOKEN_BYTES
    with pytest.raises(ConfigError) as caught:
        decide(kv_cache_memory_bytes=budget)
    assert str(caught.value) == (
        "one sequence of max_model_len 256 tokens needs 256.0 KiB of KV cache, but only 100.0 KiB "
        "is available (set by --kv-cache-memory-bytes); start with --max-model-len 96 or less, or "
        "give more memory with --kv-cache-memory-bytes"
    )
    decision = decide(kv_cache_memory_bytes=budget, max_model_len=96)
    assert decision.num_blocks * 16 == decision.max_model_len == 96


def test_an_automatic_length_shrinks_to_what_fits() -> None:
    decision = decide(kv_cache_memory_bytes=100 * TOKEN_BYTES, max_model_len=None)
    assert decision.max_model_len == 96
    assert decision.reason.endswith("max_model_len reduced from 512 to the 96 tokens that fit")
    assert decide(max_model_len=None).max_model_len == MAX_POSITION


@pytest.mark.parametrize("max_model_len", [None, 256])
def test_no_block_at_all_is_an_error_without_a_length(max_model_len: int | None) -> None:
    with pytest.raises(ConfigError, match=r"15\.9 KiB is available") as caught:
        decide(kv_cache_memory_bytes=16 * TOKEN_BYTES - 1, max_model_len=max_model_len)
    assert "--max-model-len" not in str(caught.value)


def test_no_free_memory_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"50% of 0\.0 MiB free memory"):
        decide(free_memory_bytes=0)
