"""How much memory the KV cache gets."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.errors import ConfigError

_MIB = 2**20


class KVDecision(NamedTuple):
    """num_bytes: of all blocks. max_model_len: as asked, or what was found to fit. reason: a
    sentence for the start-up report.
    """

    num_blocks: int
    num_bytes: int
    max_model_len: int
    reason: str


def decide_num_blocks(
    max_position: int,
    *,
    block_size: int,
    block_bytes: int,
    kv_cache_memory_bytes: int | None,
    free_memory_bytes: int,
    memory_share: float,
    max_num_seqs: int,
    max_model_len: int | None,
    state_bytes: int = 0,
) -> KVDecision:
    """Size the cache: `kv_cache_memory_bytes` if given, else `memory_share` of the free memory, but
    no more than `max_num_seqs` sequences of `max_model_len` tokens could ever fill.

    max_position: what the model was made for. block_bytes: of one block, in all layers.
    free_memory_bytes: what the weights leave. max_model_len: None takes the model's own, or less if
    the memory holds no sequence of that length. state_bytes: what recurrent layers keep of a
    sequence, whatever its length: of the cache's memory, `max_num_seqs` sequences have theirs
    first. Raises ConfigError if one sequence of max_model_len tokens doesn't fit, or the cache
    asked for isn't free.
    """
    wanted_len = max_position if max_model_len is None else max_model_len
    blocks_per_sequence = -(-wanted_len // block_size)
    useful_blocks = blocks_per_sequence * max_num_seqs
    if kv_cache_memory_bytes is not None:
        available_bytes = kv_cache_memory_bytes
        if available_bytes > free_memory_bytes:
            raise ConfigError(
                f"--kv-cache-memory-bytes asks for {available_bytes / _MIB:.1f} MiB, but only "
                f"{free_memory_bytes / _MIB:.1f} MiB are free beside the weights; lower it"
            )
        source = "set by --kv-cache-memory-bytes"
    else:
        available_bytes = int(free_memory_bytes * memory_share)
        source = f"{memory_share:.0%} of {free_memory_bytes / _MIB:.1f} MiB free memory"
    if states := max_num_seqs * state_bytes:
        available_bytes = max(0, available_bytes - states)
        source += f", less {states / _MIB:.1f} MiB of states for --max-num-seqs {max_num_seqs}"
    num_blocks = available_bytes // block_bytes
    if kv_cache_memory_bytes is None and num_blocks >= useful_blocks:
        num_blocks = useful_blocks
        source = f"all that {max_num_seqs} sequences can use, within {source}"

    largest_len = num_blocks * block_size
    if largest_len < wanted_len and (max_model_len is not None or num_blocks < 1):
        raise _too_little(
            wanted_len, blocks_per_sequence * block_bytes, available_bytes, largest_len, source
        )
    num_bytes = num_blocks * block_bytes
    reason = f"{num_blocks} blocks of {block_size} tokens, {num_bytes / _MIB:.1f} MiB: {source}"
    if largest_len < wanted_len:
        reason += f"; max_model_len reduced from {wanted_len} to the {largest_len} tokens that fit"
    return KVDecision(num_blocks, num_bytes, min(wanted_len, largest_len), reason)


def _too_little(
    wanted_len: int, needed_bytes: int, available_bytes: int, largest_len: int, source: str
) -> ConfigError:
    unit, name = (_MIB, "MiB") if available_bytes >= _MIB else (1024, "KiB")
    # Rounded away from each other, so that the two figures never read as equal.
    needed = -(-needed_bytes * 10 // unit) / 10
    available = available_bytes * 10 // unit / 10
    remedy = "give more memory with --kv-cache-memory-bytes"
    if largest_len > 0:
        remedy = f"start with --max-model-len {largest_len} or less, or {remedy}"
    return ConfigError(
        f"one sequence of max_model_len {wanted_len} tokens needs {needed:.1f} {name} of KV "
        f"cache, but only {available:.1f} {name} is available ({source}); {remedy}"
    )
