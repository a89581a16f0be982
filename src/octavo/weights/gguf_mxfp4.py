"""GGUF's MXFP4 as codes and scales: blocks of 17 bytes, an exponent and 32 codes, of which byte i
has number i in its low half and number 16 + i in the high one.

Format: ggml/src/ggml-common.h of https://github.com/ggml-org/ggml (block_mxfp4), and OCP
Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.quantization.fp4 import E2M1
from octavo.quantization.grouped import GroupedLayout, GroupedRows
from octavo.quantization.scales import scale_values

_BLOCK_BYTES = 17
_LAYOUT = GroupedLayout("table", 32, scale_dtype="bfloat16", table=E2M1)


@dataclass(frozen=True)
class MXFP4Blocks:
    """A `GroupedTensor`. stored: gives rows in their blocks, (rows, bytes of a row) uint8."""

    stored: Callable[[slice], np.ndarray]
    layout: GroupedLayout = _LAYOUT
    input_order: None = None

    def read(self, rows: slice) -> GroupedRows:
        stored = self.stored(rows)
        blocks = stored.reshape(len(stored), -1, _BLOCK_BYTES)
        halves = blocks[:, :, 1:]
        codes = np.concatenate([halves & 15, halves >> 4], axis=2)
        return GroupedRows(codes.reshape(len(stored), -1), scale_values(blocks[:, :, 0]))
