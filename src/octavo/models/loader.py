"""Weights from a checkpoint into a model, driven by what the model declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.core.errors import ConfigError
from octavo.layers.layer import Layer, Weight
from octavo.models.stored_piece import Checkpoint, StoredPiece
from octavo.ops.backend import WeightRequest
from octavo.quantization.grouped import GroupedTensor

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM
    from octavo.models.pipeline_stage import PipelineStage
    from octavo.ops.backend import Backend, WeightPlan

MAX_NAMES = 5
"""Tensors named in a message; further ones are counted."""


class Weighted(Protocol):
    """The part of a `CausalLM`, or of a draft head, that loading needs.

    family: for messages. ignored: patterns (fnmatch) of tensors that may be left unread. renames:
    (theirs, ours): beginnings of names that some checkpoints have in place of the model's; an empty
    one is that of models saved without their head.
    """

    @property
    def family(self) -> str: ...

    @property
    def renames(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def weights(self) -> Iterator[Weight]: ...

    def tensors(self) -> Iterator[list[Weight]]: ...


class _Renamed:
    """A `Checkpoint` in which names that begin with `theirs` begin with `ours`."""

    def __init__(self, inner: Checkpoint, theirs: str, ours: str) -> None:
        self.name = inner.name
        self._inner = inner
        self._stored = {
            ours + name.removeprefix(theirs) if name.startswith(theirs) else name: name
            for name in inner.tensors
        }
        self.tensors = {name: inner.tensors[stored] for name, stored in self._stored.items()}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._inner.read(self._stored[name], rows)

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._inner.read_stored(self._stored[name], rows)

    def grouped(self, name: str) -> GroupedTensor | None:
        return self._inner.grouped(self._stored[name])

    def content_id(self) -> str:
        return self._inner.content_id()


def renamed(model: Weighted, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names that the model has for its tensors."""
    for theirs, ours in model.renames:
        if not any(name.startswith(ours) for name in checkpoint.tensors):
            checkpoint = _Renamed(checkpoint, theirs, ours)
    return checkpoint


def plan_weights(
    model: Weighted,
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: str,
    quantization: str | None = None,
    *,
    part: Layer | None = None,
) -> WeightPlan:
    """How `backend` will hold the model's weights, or those of a part of it; see
    `Backend.plan_weights`.

    Raises ConfigError that names missing, unexpected and wrongly shaped tensors of the whole model.
    Reads none.
    """
    checkpoint = renamed(model, checkpoint)
    _check(model, model.weights(), checkpoint)
    return backend.plan_weights(
        _requests((model if part is None else part).tensors(), checkpoint),
        dtype=dtype,
        quantization=quantization,
        source=checkpoint.content_id(),
    )


def load_layer(layer: Layer, checkpoint: Checkpoint, backend: Backend, dtype: str) -> None:
    """Give a part of a model its weights, whatever else the checkpoint has."""
    plan = backend.plan_weights(_requests(layer.tensors(), checkpoint), dtype=dtype)
    for group, arrays in zip(layer.tensors(), plan.load(), strict=True):
        for weight, array in zip(group, arrays, strict=True):
            weight.array = array


def _requests(tensors: Iterable[list[Weight]], checkpoint: Checkpoint) -> list[WeightRequest]:
    return [
        WeightRequest(
            tuple(StoredPiece(checkpoint, piece) for piece in group[0].pieces),
            group[0].shape,
            tuple(weight.role for weight in group),
            group[0].dtype,
            group[0].offset,
        )
        for group in tensors
    ]


def load_weights(
    model: Weighted | Layer, plan: WeightPlan, progress: Callable[[int, int], None] | None = None
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


def make_rope_tables(model: CausalLM | PipelineStage, backend: Backend, num_positions: int) -> None:
    """Give the model's tables of positions `num_positions` rows."""
    for table in model.position_tables():
        table.array = backend.from_host(table.compute(num_positions))


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
    faults = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)
    if faults:
        raise ConfigError(
            f"the tensors of {checkpoint.name} are not those of its config ({model.family}):"
            f" {faults}. Fetch the model again, or correct its config.json"
        )


def listed(names: list[str]) -> str:
    """A part of a message: the first of them, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES])
    rest = len(names) - MAX_NAMES
    return f"{shown} ... and {rest} more" if rest > 0 else shown
