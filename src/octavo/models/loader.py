"""Weights from a checkpoint into a model, driven by what the model declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from octavo.core.errors import ConfigError
from octavo.layers.layer import Weight
from octavo.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from octavo.ops.backend import Backend

MAX_NAMES = 5
"""Tensors named in a message; further ones are counted."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StoredTensor(Protocol):
    """What a checkpoint says of a tensor before reading it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Checkpoint(Protocol):
    """The part of octavo.weights.Checkpoint that loading needs."""

    @property
    def name(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """StoredTensor by name."""
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray: ...


def load_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    num_positions: int | None = None,
) -> None:
    """Fill every weight and rotary table of `model` with arrays of `backend`.

    dtype: of all weights that don't insist on their own. progress: called with the bytes loaded and
    the bytes in all. num_positions: length of the rotary tables (None: all that the model reaches).
    Raises ConfigError that names missing, unexpected and wrongly shaped tensors before reading any.
    """
    weights = list(model.weights())
    _check(model, weights, checkpoint)
    sizes = [math.prod(w.shape) * _ITEM_BYTES[w.dtype or dtype] for w in weights]
    loaded, total = 0, sum(sizes)
    for weight, size in zip(weights, sizes, strict=True):
        weight.array = backend.from_host(_read(weight, checkpoint), weight.dtype or dtype)
        loaded += size
        if progress is not None:
            progress(loaded, total)
    for rope in model.rope_tables():
        rope.array = backend.from_host(rope.compute(num_positions or model.max_position))


def _read(weight: Weight, checkpoint: Checkpoint) -> np.ndarray:
    # A copy even of a single part: what `read` gives may be a window on the file.
    array = np.concatenate([checkpoint.read(name) for name in weight.names])
    return array.astype(np.float32) + np.float32(weight.offset) if weight.offset else array


def _check(model: CausalLM, weights: Iterable[Weight], checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors
    wanted = {name: shape for weight in weights for name, shape in weight.parts()}
    missing = [name for name in wanted if name not in stored]
    misshapen = [
        f"{name} is {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    unexpected = [
        name
        for name in stored
        if name not in wanted and not any(fnmatchcase(name, p) for p in model.ignored)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    faults = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
    if faults:
        raise ConfigError(
            f"the tensors of {checkpoint.name} are not those of its config ({model.family}):"
            f" {faults}. Fetch the model again, or correct its config.json"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    rest = len(names) - MAX_NAMES
    return f"{shown} ... and {rest} more" if rest > 0 else shown
