"""A quantized folder as a checkpoint of whole matrices, under the names that its model has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.detection import is_for_activations, quantized_matrices
from octavo.quantization.grouped import GroupedTensor
from octavo.quantization.matrix import QuantizedMatrix
from octavo.weights.checkpoint import TensorSpec, TextAssets
from octavo.weights.safetensors_folder import SafetensorsFolder, read_json_object


def quantization_of(folder: SafetensorsFolder) -> Mapping[str, Any] | None:
    """config.json's quantization_config, of the part that writes if there are others; or what
    AutoGPTQ, AutoAWQ and ModelOpt used to keep in files of their own. None if the folder is not
    quantized.

    Raises ConfigError for one that is no object.
    """
    inner = folder.config.get("text_config")
    for values in (folder.config, inner if isinstance(inner, Mapping) else {}):
        found = values.get("quantization_config")
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(
                f"config.json: quantization_config is {found!r:.200}, not an object; fetch the "
                "model again"
            )
        if found:
            return found
    if (path := folder.path / "quantize_config.json").is_file():
        return {"quant_method": "gptq", **read_json_object(path)}
    if (path := folder.path / "quant_config.json").is_file():
        values = read_json_object(path)
        renamed = {"bits": values.get("w_bit"), "group_size": values.get("q_group_size")}
        return {"quant_method": "awq", **renamed, **values}
    if (path := folder.path / "hf_quant_config.json").is_file():
        of_tool = read_json_object(path).get("quantization")
        return {"quant_method": "modelopt", **(of_tool if isinstance(of_tool, Mapping) else {})}
    return None


class QuantizedCheckpoint:
    """A `Checkpoint`: the tensors that a format makes matrices of are seen as these matrices.

    quantization: from `quantization_of`. What doesn't fit it shows when `tensors` is
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
        left = {part for matrix in self._matrices.values() for part in matrix.parts}
        left |= self._biases_of_zeros()
        floats = {
            name: spec
            for name, spec in self._folder.tensors.items()
            if name not in left and not is_for_activations(name)
        }
        if both := [name for name in self._matrices if name in floats]:
            raise ConfigError(
                f"{self.name}: tensor {both[0]!r} is there as it is and again in "
                f"{self._matrices[both[0]].dtype}; fetch the model again"
            )
        return floats | {
            name: TensorSpec(name, matrix.shape, matrix.dtype)
            for name, matrix in self._matrices.items()
        }

    def _biases_of_zeros(self) -> set[str]:
        """Of projections that have no other biases in any layer: AutoGPTQ wrote them for models
        that have none.
        """
        by_kind: dict[str, list[str]] = {}
        for name in self._matrices:
            module = name.removesuffix(".weight")
            if f"{module}.bias" in self._folder.tensors:
                by_kind.setdefault(module.rpartition(".")[2], []).append(f"{module}.bias")
        return {
            name
            for names in by_kind.values()
            if not any(self._folder.read(bias).any() for bias in names)
            for name in names
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
