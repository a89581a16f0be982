"""What layers are made of: declared weights, found by walking attributes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from octavo.core.errors import InvariantError
from octavo.ops import Array
from octavo.ops.backend import Role


class Weight:
    """A parameter that knows where a checkpoint keeps it.

    names: checkpoint tensors, stacked along axis 0 in this order (fused projections have several).
    shape: after stacking. role: what ops do with it. rows: how many of them each name gives (None:
    equal shares). dtype: None takes the model's; norms are kept in float32. offset: added at load
    (norms that store weight - 1). columns: (first, all): it is a part of tensors that have so many
    columns, those from `first` on. Tied weights have the same names and different roles.
    """

    def __init__(
        self,
        *names: str,
        shape: tuple[int, ...],
        role: Role,
        rows: tuple[int, ...] | None = None,
        dtype: str | None = None,
        offset: float = 0.0,
        columns: tuple[int, int] | None = None,
    ) -> None:
        self.names = names
        self.shape = shape
        self.role: Role = role
        self.rows = rows or (shape[0] // len(names),) * len(names)
        self.dtype = dtype
        self.offset = offset
        self.columns = columns
        self._array: Array | None = None

    def parts(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each checkpoint tensor with the shape it must have."""
        width = self.shape[1:] if self.columns is None else (self.columns[1],)
        for name, rows in zip(self.names, self.rows, strict=True):
            yield name, (rows, *width)

    @property
    def array(self) -> Array:
        if self._array is None:
            raise InvariantError(f"weight {self.names[0]} is used before it is loaded")
        return self._array

    @array.setter
    def array(self, value: Array) -> None:
        self._array = value


class Layer:
    """A part of a model. Its weights are its attributes, those of sub-layers and of lists of
    sub-layers.
    """

    def tensors(self) -> Iterator[list[Weight]]:
        """The weights grouped by what of the checkpoint they are made of: tied ones are together,
        all others alone.
        """
        groups: dict[object, list[Weight]] = {}
        for weight in self.weights():
            groups.setdefault((weight.names, weight.columns), []).append(weight)
        yield from groups.values()

    def weights(self) -> Iterator[Weight]:
        """Every declared weight, in order of declaration."""
        for value in vars(self).values():
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Weight):
                    yield part
                elif isinstance(part, Layer):
                    yield from part.weights()


def num_vector_parameters(layer: Layer) -> int:
    """Of norms and biases, sub-layers included."""
    return sum(math.prod(weight.shape) for weight in layer.weights() if weight.role == "vector")
