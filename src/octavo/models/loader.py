"""Weights from a checkpoint into a model, driven by what the model declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import ConfigError
from octavo.layers.layer import Weight
from octavo.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from octavo.ops.backend import Backend

MAX_NAMES = 5
"""Tensors named in a message; further ones are counted."""


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


def weight_bytes(model: CausalLM, dtype: str) -> int:
    """Memory of all weights, in `dtype` but for those that insist on their own."""
    return sum(_num_bytes(group[0], dtype) for group in model.tensors())


def load_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill every weight of `model` with arrays of `backend`.

    dtype: of all weights that don't insist on their own. progress: called with the bytes loaded and
    the bytes in all.
    Raises ConfigError that names missing, unexpected and wrongly shaped tensors before reading any.
    """
    _check(model, model.weights(), checkpoint)
    loaded, total = 0, weight_bytes(model, dtype)
    for group in model.tensors():
        first = group[0]
        roles = [weight.role for weight in group]
        arrays = backend.load_weight(_read(first, checkpoint), roles, first.dtype or dtype)
        for weight, array in zip(group, arrays, strict=True):
            weight.array = array
        loaded += _num_bytes(first, dtype)
        if progress is not None:
            progress(loaded, total)


def make_rope_tables(model: CausalLM, backend: Backend, num_positions: int) -> None:
    """Give the model's rotary tables `num_positions` rows."""
    for rope in model.rope_tables():
        rope.array = backend.from_host(rope.compute(num_positions))


def _num_bytes(weight: Weight, dtype: str) -> int:
    return math.prod(weight.shape) * BYTES_PER_VALUE[weight.dtype or dtype]


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
