"""A quantized folder as a checkpoint of whole matrices, under the names that its model has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.quantization.detection import is_for_activations, quantized_matrices
from octavo.quantization.grouped import GroupedTensor
from octavo.quantization.matrix import QuantizedMatrix
from octavo.weights.checkpoint import TensorSpec, TextAssets
from octavo.weights.safetensors_folder import SafetensorsFolder


class QuantizedCheckpoint:
    """A `Checkpoint`: the tensors that a format makes matrices of are seen as these matrices.

    quantization: config.json's quantization_config. What doesn't fit it shows when `tensors` is
    asked for: metadata can be read of a model in a format that can't.
    """

    def __init__(self, folder: SafetensorsFolder, quantization: Mapping[str, Any]) -> None:
        self.name = folder.name
        self.path: Path = folder.path
        self.config = folder.config
        self.generation_config = folder.generation_config
        self._folder = folder
        self._quantization = quantization

    def __reduce__(self) -> tuple[type[QuantizedCheckpoint], tuple[object, ...]]:
        return QuantizedCheckpoint, (self._folder, self._quantization)

    @cached_property
    def _matrices(self) -> dict[str, QuantizedMatrix]:
        found = quantized_matrices(self._quantization, self._folder)
        return {matrix.name: matrix for matrix in found}

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Raises ConfigError for a format that isn't read, or files that don't keep to it."""
        parts = {part for matrix in self._matrices.values() for part in matrix.parts}
        floats = {
            name: spec
            for name, spec in self._folder.tensors.items()
            if name not in parts and not is_for_activations(name)
        }
        return floats | {
            name: TensorSpec(name, matrix.shape, matrix.dtype)
            for name, matrix in self._matrices.items()
        }

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._folder.read(name, rows)
        return matrix.read(slice(None) if rows is None else rows)

    read_stored = read

    def grouped(self, name: str) -> GroupedTensor | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.grouped()

    def release_pages(self) -> None:
        self._folder.release_pages()

    def content_id(self) -> str:
        """With config.json's part: zero points, for one, mean what it says."""
        content = json.dumps(self._quantization, sort_keys=True) + self._folder.content_id()
        return hashlib.sha256(content.encode()).hexdigest()

    def text_assets(self) -> TextAssets:
        return self._folder.text_assets()
