"""How the KV cache gets its memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.core.model_spec import KVFormat
from octavo.ops.native.backend import NativeBackend

MIB = 1 << 20
PAGE = 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_layers_do_not_all_ask_for_memory_in_the_same_step() -> None:
    """64 blocks of 32 KiB fill a huge page: unless layers are shifted, each 64th block would take
    eight of these at once.
    """
    backend = NativeBackend(threads=1)
    layers = backend.allocate_kv(200, 16, [(8, 64)] * 8, KVFormat("bfloat16"))
    before, grown = _resident(), []
    for block in range(1, 200):
        for layer in layers:
            layer.memory.copy_blocks([(0, block)])
        now = _resident()
        grown.append(now - before)
        before = now
    assert sum(grown) >= 40 * MIB
    assert max(grown[8:]) <= 6 * MIB


def _resident() -> int:
    """Bytes of this process."""
    return PAGE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
