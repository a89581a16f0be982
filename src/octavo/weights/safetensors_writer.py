"""Writing one .safetensors file. Format: https://huggingface.co/docs/safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octavo.weights.safetensors_file import DTYPES

_ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Tensors follow one another in the order of the mapping, those of wider items first so that
    all are aligned. metadata: kept in the header.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name in ordered:
        array = tensors[name]
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, begin + array.nbytes],
        }
        begin += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())
