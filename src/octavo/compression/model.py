"""From a checkpoint to a quantized one: matrix by matrix, block by block."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.compression.calibration import Calibration
from octavo.compression.compensation import compensated_codes, output_error
from octavo.compression.grid import DTYPES, Grid, grid_of
from octavo.compression.packed import packed_tensors, quantization_config
from octavo.core.dtypes import DTYPE_ALIASES, INTEGER_QUANTIZATIONS, Quantization
from octavo.core.errors import ConfigError
from octavo.layers.layer import Layer
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import renamed
from octavo.models.stored_piece import Checkpoint as Tensors
from octavo.weights import Checkpoint
from octavo.weights.safetensors_file import DTYPES as STORED_DTYPES
from octavo.weights.safetensors_writer import ShardedWriter

SMALLEST_GROUP = 32

_PLAIN = {dtype.name for dtype in STORED_DTYPES.values()}

Progress = Callable[[int, int], None]
"""Called with blocks done and blocks in all."""


@dataclass(frozen=True)
class MatrixErrors:
    """How far a quantized matrix is off. weights: |W - K| / |W|. outputs: the same of what it gives
    over the calibration text; nearest: had all weights been rounded to the nearest; both None
    without calibration. group_size: inputs that share a scale.
    """

    name: str
    group_size: int
    weights: float
    outputs: float | None = None
    nearest: float | None = None


@dataclass(frozen=True)
class Written:
    """num_bytes: of all tensors. kept: matrices of blocks that stay as they were: rows are no
    multiple of `SMALLEST_GROUP`, or they are stored as columns, or several as one tensor.
    """

    num_bytes: int
    matrices: list[MatrixErrors]
    kept: list[str]


def dtype_of_scales(checkpoint: Checkpoint, asked: str) -> str:
    """What scales, and all that is not quantized, are stored in. asked: the --dtype flag."""
    stored = str(checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or "")
    name = stored if asked == "auto" else DTYPE_ALIASES.get(asked, asked)
    return name if name in DTYPES else "bfloat16"


def check_fits(model: CausalLM, checkpoint: Checkpoint, name: str) -> None:
    """Raises ConfigError if there is nothing that the format `name` could make smaller: no matrix
    that it fits, or a checkpoint whose matrices take as few bits already.

    GGUF files are let through whatever their bits: what is written is another kind of file.
    """
    form = INTEGER_QUANTIZATIONS[name]
    chosen = {one.name for block in model.blocks for one in _matrices(block, form) if one.size}
    if not chosen:
        raise ConfigError(
            f"{checkpoint.name} has no matrix that {name} fits: rows of {SMALLEST_GROUP} weights "
            "or a multiple, an output a row, one matrix a tensor; use --quantization instead, "
            "which rounds as it loads"
        )
    if checkpoint.path.is_file():
        return
    stored = renamed(model, checkpoint)
    for tensor, spec in stored.tensors.items():
        if spec.dtype in _PLAIN:
            continue
        grouped = stored.grouped(tensor)
        has_8_bits = grouped is not None and grouped.layout.codes in ("int8", "fp8")
        if tensor not in chosen or not has_8_bits or form.bits == 8:
            raise ConfigError(
                f"{checkpoint.name} is quantized already ({tensor} in {spec.dtype}), and {name} "
                "would round it a second time for nothing; quantize the model that it was made "
                "from, or serve it as it is"
            )


def quantize(
    model: CausalLM,
    checkpoint: Checkpoint,
    name: str,
    folder: Path,
    *,
    dtype: str,
    calibration: Calibration | None,
    progress: Progress,
) -> Written:
    """Write the checkpoint with its blocks' matrices in the format `name` (a key of
    `INTEGER_QUANTIZATIONS`) as compressed-tensors stores it; embedding, head, norms and biases stay
    in `dtype` (a key of `grid.DTYPES`).

    calibration: of the same model; without, weights are rounded to the nearest. A smaller group is
    taken where rows are no multiple of the format's. Raises ConfigError as `check_fits` does, and
    for weights that are no numbers.
    """
    check_fits(model, checkpoint, name)
    form = INTEGER_QUANTIZATIONS[name]
    stored = renamed(model, checkpoint)
    writer = ShardedWriter(folder)
    errors: list[MatrixErrors] = []
    kept: list[str] = []
    for index, block in enumerate(model.blocks):
        progress(index, len(model.blocks))
        hessians = {} if calibration is None else calibration.hessians(index)
        values: dict[str, np.ndarray] = {}
        for one in _matrices(block, form):
            if one.size is None:
                kept.append(one.name)
                continue
            weights = stored.read(one.name).astype(np.float32)
            if not np.isfinite(weights).all():
                raise ConfigError(
                    f"{checkpoint.name}: {one.name} has weights that are no numbers, which nothing "
                    "can be rounded to; fetch the model again"
                )
            fitting = form._replace(group_size=one.size)
            grid, codes, error = _quantized(
                one.name, weights, fitting, dtype, hessians.get(one.name)
            )
            errors.append(error)
            values[one.name] = grid.values(codes)
            writer.add(packed_tensors(one.name.removesuffix(".weight"), grid, codes, dtype))
        if calibration is not None:
            calibration.advance(index, values)
        checkpoint.release_pages()
    progress(len(model.blocks), len(model.blocks))
    done = {error.name for error in errors}
    rest = [tensor for tensor in stored.tensors if tensor not in done]
    for tensor in rest:
        writer.add({tensor: _in_dtype(stored.read(tensor), dtype)})
    writer.finish()
    _write_config(model, checkpoint.config, stored, form, folder, dtype, errors, rest)
    return Written(writer.num_bytes, errors, kept)


class _Matrix(NamedTuple):
    """name: the checkpoint's. size: of its groups; None if it can't be quantized."""

    name: str
    size: int | None


def _matrices(layer: Layer, form: Quantization) -> Iterator[_Matrix]:
    """All that a layer multiplies by. Those can be quantized whose rows are inputs' weights, all of
    them.
    """
    found: dict[str, tuple[tuple[int, ...], bool]] = {}
    for weight in layer.weights():
        if weight.role not in ("matrix", "matrices"):
            continue
        for piece in weight.pieces:
            is_plain = piece.matrix is None and not piece.is_transposed and piece.columns is None
            _, so_far = found.get(piece.name, (piece.shape, True))
            found[piece.name] = piece.shape, so_far and is_plain and len(piece.shape) == 2
    for name, (shape, is_plain) in found.items():
        fits = is_plain and name.endswith(".weight")
        yield _Matrix(name, _group_size(form, shape[1]) if fits else None)


def _group_size(form: Quantization, inputs: int) -> int | None:
    if form.group_size is None:
        return inputs
    size = form.group_size
    while inputs % size and size > SMALLEST_GROUP:
        size //= 2
    return None if inputs % size else size


def _quantized(
    name: str,
    weights: np.ndarray,
    form: Quantization,
    dtype: str,
    hessian: np.ndarray | None,
) -> tuple[Grid, np.ndarray, MatrixErrors]:
    plain = grid_of(weights, form, dtype)
    nearest = plain.codes(weights)
    size = plain.group_size
    if hessian is None:
        error = _relative(weights, plain.values(nearest))
        return plain, nearest, MatrixErrors(name, size, error)
    grid = grid_of(weights, form, dtype, np.diagonal(hessian))
    codes = compensated_codes(weights, hessian, grid)
    kept = grid.values(codes)
    outputs = output_error(weights, kept, hessian)
    of_nearest = output_error(weights, plain.values(nearest), hessian)
    return grid, codes, MatrixErrors(name, size, _relative(weights, kept), outputs, of_nearest)


def _relative(weights: np.ndarray, kept: np.ndarray) -> float:
    whole = float(np.linalg.norm(weights))
    return float(np.linalg.norm(weights - kept)) / whole if whole else 0.0


def _in_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    is_float = array.dtype in DTYPES.values() or array.dtype.kind == "f"
    return np.array(array, DTYPES[dtype]) if is_float else np.array(array)


def _write_config(
    model: CausalLM,
    config: Mapping[str, Any],
    stored: Tensors,
    form: Quantization,
    folder: Path,
    dtype: str,
    errors: Sequence[MatrixErrors],
    rest: Sequence[str],
) -> None:
    """config.json, the last of all files: without it the folder is no model."""
    modules: dict[int, list[str]] = defaultdict(list)
    for error in errors:
        modules[error.group_size].append(error.name.removesuffix(".weight"))
    tables = set(model.embedding.table.names)
    ignored = [
        name.removesuffix(".weight")
        for name in rest
        if name.endswith(".weight") and name not in tables and len(stored.tensors[name].shape) == 2
    ]
    written: dict[str, Any] = {
        **config,
        "quantization_config": quantization_config(
            modules,
            bits=form.bits,
            is_symmetric=form.is_symmetric,
            by_channel=form.group_size is None,
            ignored=list(dict.fromkeys([*ignored, "lm_head"])),
        ),
    }
    written["dtype" if "torch_dtype" not in config else "torch_dtype"] = dtype
    text = json.dumps(written, indent=2, default=np.ndarray.tolist)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
