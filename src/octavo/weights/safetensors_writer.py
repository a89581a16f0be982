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


class ShardedWriter:
    """A checkpoint's tensors, written as they come: a file is complete when it has `shard_bytes`,
    or when all is.
    """

    def __init__(self, folder: Path, shard_bytes: int = 4 * 2**30) -> None:
        """folder: made if it isn't there. It has files of these names when `finish` is done:
        model.safetensors, or model-00001-of-00002.safetensors, ..., with an index.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, np.ndarray] = {}
        self._waiting_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, np.ndarray]) -> None:
        """They stay in memory until their file is written, and must not change."""
        for name, array in tensors.items():
            if self._waiting and self._waiting_bytes + array.nbytes > self._shard_bytes:
                self._write()
            self._waiting[name] = array
            self._waiting_bytes += array.nbytes
            self.num_bytes += array.nbytes

    def finish(self) -> None:
        self._write()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            name = "model.safetensors"
            if count > 1:
                name = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._shards):05d}"
        write_safetensors(path, self._waiting, {"format": "pt"})
        self._shards.append((path, list(self._waiting)))
        self._waiting, self._waiting_bytes = {}, 0
