"""Matrices as compressed-tensors stores them in its format "pack-quantized". Source:
https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.compression.grid import DTYPES, Grid

_WORD_BITS = 32


def packed_tensors(
    module: str, grid: Grid, codes: np.ndarray, scale_dtype: str
) -> dict[str, np.ndarray]:
    """The tensors of a matrix (O, I), by name. module: its name without ".weight".

    weight_packed (O, I bits / 32) int32, codes of a row from a word's lowest bits on; weight_scale
    (O, G); weight_shape (2,); with zeros, weight_zero_point (O bits / 32, G) int32, packed along
    the outputs.
    """
    tensors = {
        f"{module}.weight_packed": _packed(codes, grid.bits),
        f"{module}.weight_scale": grid.scales.astype(DTYPES[scale_dtype]),
        f"{module}.weight_shape": np.array(codes.shape, np.int64),
    }
    if grid.zeros is not None:
        zeros = _packed(np.ascontiguousarray(grid.zeros.T), grid.bits)
        tensors[f"{module}.weight_zero_point"] = np.ascontiguousarray(zeros.T)
    return tensors


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """(R, C) uint8 -> (R, ceil(C bits / 32)) int32."""
    rows, count = codes.shape
    per_word = _WORD_BITS // bits
    padded = np.zeros((rows, -(-count // per_word) * per_word), np.uint32)
    padded[:, :count] = codes
    words = padded.reshape(rows, -1, per_word) << np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    joined: np.ndarray = np.bitwise_or.reduce(words, axis=-1)
    return joined.astype("<u4").view("<i4")


def quantization_config(
    modules: Mapping[int, Sequence[str]],
    *,
    bits: int,
    is_symmetric: bool,
    by_channel: bool,
    ignored: Sequence[str],
) -> dict[str, Any]:
    """`quantization_config` of config.json. modules: the quantized ones, by group size; those of
    the commonest are not named. ignored: those that are not quantized.
    """
    if by_channel:
        modules = {0: [name for names in modules.values() for name in names]}
    commonest = max(modules, key=lambda size: len(modules[size]))
    groups: dict[str, Any] = {}
    for index, (size, names) in enumerate(modules.items()):
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if size == commonest else list(names),
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": is_symmetric,
                "strategy": "channel" if by_channel else "group",
                "group_size": None if by_channel else size,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }
