"""Weights from a checkpoint into a model, driven by what the model declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from octavo.core.errors import ConfigError, InvariantError
from octavo.layers.layer import Weight
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import WeightRequest
from octavo.quantization.grouped import GroupedTensor, grouped_columns

if TYPE_CHECKING:
    from octavo.ops.backend import Backend, WeightPlan

MAX_NAMES = 5
"""Tensors named in a message; further ones are counted."""


class StoredTensor(Protocol):
    """What a checkpoint says of a tensor before reading it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


class Checkpoint(Protocol):
    """The part of octavo.weights.Checkpoint that loading needs."""

    @property
    def name(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """StoredTensor by name."""
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray: ...

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray: ...

    def grouped(self, name: str) -> GroupedTensor | None: ...

    def content_id(self) -> str: ...


class Weighted(Protocol):
    """The part of a `CausalLM`, or of a draft head, that loading needs.

    family: for messages. ignored: patterns (fnmatch) of tensors that may be left unread.
    """

    @property
    def family(self) -> str: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def weights(self) -> Iterator[Weight]: ...

    def tensors(self) -> Iterator[list[Weight]]: ...


@dataclass(frozen=True)
class _Part:
    """A `StoredArray`: one tensor of the checkpoint, or some columns of it."""

    checkpoint: Checkpoint
    tensor: str
    columns: slice | None

    @property
    def name(self) -> str:
        if self.columns is None:
            return self.tensor
        return f"{self.tensor}[:, {self.columns.start}:{self.columns.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.checkpoint.tensors[self.tensor].shape
        if self.columns is None:
            return shape
        return (shape[0], self.columns.stop - self.columns.start)

    @property
    def dtype(self) -> str:
        return str(self.checkpoint.tensors[self.tensor].dtype)

    def read(self, rows: slice) -> np.ndarray:
        values = self.checkpoint.read(self.tensor, rows)
        return values if self.columns is None else values[:, self.columns]

    def read_stored(self, rows: slice) -> np.ndarray:
        if self.columns is not None:
            raise InvariantError(f"{self.name}: blocks of {self.dtype} can't be cut into columns")
        return self.checkpoint.read_stored(self.tensor, rows)

    def grouped(self) -> GroupedTensor | None:
        tensor = self.checkpoint.grouped(self.tensor)
        if tensor is None or self.columns is None:
            return tensor
        return grouped_columns(tensor, self.columns)


def plan_weights(
    model: Weighted,
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: str,
    quantization: str | None = None,
) -> WeightPlan:
    """How `backend` will hold the model's weights; see `Backend.plan_weights`.

    Raises ConfigError that names missing, unexpected and wrongly shaped tensors. Reads none.
    """
    _check(model, model.weights(), checkpoint)
    requests = [
        WeightRequest(
            tuple(_Part(checkpoint, name, _columns(group[0])) for name in group[0].names),
            group[0].shape,
            tuple(weight.role for weight in group),
            group[0].dtype,
            group[0].offset,
        )
        for group in model.tensors()
    ]
    return backend.plan_weights(
        requests, dtype=dtype, quantization=quantization, source=checkpoint.content_id()
    )


def load_weights(
    model: Weighted, plan: WeightPlan, progress: Callable[[int, int], None] | None = None
) -> None:
    """Give every weight of `model` its arrays. plan: made for this model. progress: called with the
    bytes loaded and the bytes in all.
    """
    loaded, total = 0, sum(plan.num_bytes)
    for group, num_bytes, arrays in zip(model.tensors(), plan.num_bytes, plan.load(), strict=True):
        for weight, array in zip(group, arrays, strict=True):
            weight.array = array
        loaded += num_bytes
        if progress is not None:
            progress(loaded, total)


def make_rope_tables(model: CausalLM, backend: Backend, num_positions: int) -> None:
    """Give the model's rotary tables `num_positions` rows."""
    for rope in model.rope_tables():
        rope.array = backend.from_host(rope.compute(num_positions))


def _columns(weight: Weight) -> slice | None:
    if weight.columns is None:
        return None
    first, _ = weight.columns
    return slice(first, first + weight.shape[1])


def _check(model: Weighted, weights: Iterable[Weight], checkpoint: Checkpoint) -> None:
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
