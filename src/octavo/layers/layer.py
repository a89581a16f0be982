"""What layers are made of: declared weights, found by walking attributes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from octavo.core.errors import InvariantError
from octavo.ops import Array
from octavo.ops.backend import Role


class Piece(NamedTuple):
    """Some rows of a weight: a matrix of a checkpoint, or a part of one.

    name, shape: of the tensor that holds it, as stored. matrix: which one, of a tensor that has
    several along its first axis. is_transposed: it is stored as (I, O). rows, columns: which of the
    matrix (O, I), turned round if it must be; None is all. Of a vector, rows are elements.
    """

    name: str
    shape: tuple[int, ...]
    matrix: int | None = None
    is_transposed: bool = False
    rows: range | None = None
    columns: range | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of these rows and columns."""
        shape = self.shape if self.matrix is None else self.shape[1:]
        if self.is_transposed:
            shape = shape[::-1]
        num_rows = shape[0] if self.rows is None else len(self.rows)
        if self.columns is None:
            return (num_rows, *shape[1:])
        return (num_rows, len(self.columns))

    def take_rows(self, rows: range) -> Piece:
        """The piece of these of its rows."""
        count = self.part_shape[0]
        if rows == range(count):
            return self
        return self._replace(rows=(range(count) if self.rows is None else self.rows)[_slice(rows)])

    def take_columns(self, columns: range) -> Piece:
        """The piece of these of its columns."""
        count = self.part_shape[1]
        if columns == range(count):
            return self
        own = range(count) if self.columns is None else self.columns
        return self._replace(columns=own[_slice(columns)])


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)


class Weight:
    """A parameter that knows where a checkpoint keeps it.

    names: checkpoint tensors, stacked along axis 0 in this order (fused projections have several).
    shape: after stacking. role: what ops do with it. rows: how many of them each name gives (None:
    equal shares). dtype: None takes the model's; norms are kept in float32. offset: added at load
    (norms that store weight - 1). columns: (first, all): it is a part of tensors that have so many
    columns, those from `first` on. pieces: in place of names, for what isn't made of whole tensors.
    Tied weights have the same pieces and different roles.
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
        pieces: Iterable[Piece] = (),
    ) -> None:
        self.shape = shape
        self.role: Role = role
        self.dtype = dtype
        self.offset = offset
        self.pieces = tuple(pieces) or tuple(
            Piece(name, (count, *shape[1:]))
            if columns is None
            else Piece(name, (count, columns[1]), columns=range(columns[0], columns[0] + shape[1]))
            for name, count in zip(
                names, rows or (shape[0] // len(names),) * len(names), strict=True
            )
        )
        self._array: Array | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its tensors, each once."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def parts(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each checkpoint tensor with the shape it must have."""
        yield from dict.fromkeys((piece.name, piece.shape) for piece in self.pieces)

    @property
    def array(self) -> Array:
        if self._array is None:
            raise InvariantError(f"weight {self.pieces[0].name} is used before it is loaded")
        return self._array

    @array.setter
    def array(self, value: Array) -> None:
        self._array = value

    def take_rows(self, ranges: Sequence[range]) -> None:
        """Become the rows in these ranges (of step 1), one range after another. Nothing else
        changes; of the checkpoint only these rows will be read.
        """
        pieces = []
        for wanted in ranges:
            if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= self.shape[0]:
                raise InvariantError(f"a weight of shape {self.shape} has no rows {wanted}")
            begin = 0
            for piece in self.pieces:
                count = piece.part_shape[0]
                first, last = max(wanted.start - begin, 0), min(wanted.stop - begin, count)
                if first < last:
                    pieces.append(piece.take_rows(range(first, last)))
                begin += count
        self.pieces = tuple(pieces)
        self.shape = (sum(map(len, ranges)), *self.shape[1:])

    def take_columns(self, columns: range) -> None:
        """Become these columns (of step 1) of the matrix, as `take_rows` does."""
        if columns.step != 1 or not 0 <= columns.start < columns.stop <= self.shape[1]:
            raise InvariantError(f"a weight of shape {self.shape} has no columns {columns}")
        self.pieces = tuple(piece.take_columns(columns) for piece in self.pieces)
        self.shape = (self.shape[0], len(columns))

    def release(self) -> None:
        """Keep the array no longer."""
        self._array = None


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
            groups.setdefault(weight.pieces, []).append(weight)
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
    """Of norms, biases and matrices of one row, sub-layers included."""
    return sum(
        math.prod(weight.shape)
        for weight in layer.weights()
        if weight.role == "vector" or weight.shape[0] == 1
    )
