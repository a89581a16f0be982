"""A piece of a weight, as backends read it from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import InvariantError
from octavo.layers.layer import Piece
from octavo.quantization.grouped import (
    GroupedLayout,
    GroupedRows,
    GroupedTensor,
    grouped_columns,
)
from octavo.weights.gguf_header import BLOCK_FORMATS


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


@dataclass(frozen=True)
class StoredPiece:
    """A `StoredArray`: a tensor of the checkpoint, or what `Piece` says of it."""

    checkpoint: Checkpoint
    piece: Piece

    @cached_property
    def name(self) -> str:
        """The tensor's, with what is taken of it: it identifies the values."""
        piece = self.piece
        name = piece.name if piece.matrix is None else f"{piece.name}[{piece.matrix}]"
        if piece.is_transposed:
            name += ".T"
        if piece.rows is not None or piece.columns is not None:
            name += f"[{_text(piece.rows)}, {_text(piece.columns)}]"
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.part_shape

    @property
    def dtype(self) -> str:
        """As stored, where rows of it are stored so; else "float32", which `read` gives."""
        stored, columns = self._stored_dtype, self.piece.columns
        if stored in BYTES_PER_VALUE:
            return stored
        if self.piece.is_transposed or (columns is not None and not self._are_blocks(columns)):
            return "float32"
        return stored

    def read(self, rows: slice) -> np.ndarray:
        piece = self.piece
        wanted = self._rows(rows)
        if not piece.is_transposed:
            values = self._stored_rows(self.checkpoint.read, wanted)
            return values if piece.columns is None else values[:, _slice(piece.columns)]
        num_inputs = piece.shape[-2]
        columns = range(num_inputs) if piece.columns is None else piece.columns
        return self._stored_rows(self.checkpoint.read, columns)[:, _slice(wanted)].T

    def read_stored(self, rows: slice) -> np.ndarray:
        columns = self.piece.columns
        if self.piece.is_transposed or (columns is not None and not self._are_blocks(columns)):
            raise InvariantError(f"{self.name} cuts rows as they are stored")
        values = self._stored_rows(self.checkpoint.read_stored, self._rows(rows))
        if columns is None:
            return values
        block = BLOCK_FORMATS[self._stored_dtype]
        places = slice(columns.start // block.elements, columns.stop // block.elements)
        return values.reshape(len(values), -1, block.num_bytes)[:, places].reshape(len(values), -1)

    def grouped(self) -> GroupedTensor | None:
        piece, rows = self.piece, self.piece.rows
        tensor = None if piece.is_transposed else self.checkpoint.grouped(piece.name)
        if tensor is not None and piece.columns is not None:
            tensor = grouped_columns(tensor, _slice(piece.columns))
        if piece.matrix is not None:  # the rows of all matrices count through
            each = piece.shape[1]
            rows = range(each) if rows is None else rows
            first = piece.matrix * each
            rows = range(first + rows.start, first + rows.stop, rows.step)
        return tensor if tensor is None or rows is None else _Rows(tensor, rows)

    @property
    def _stored_dtype(self) -> str:
        return str(self.checkpoint.tensors[self.piece.name].dtype)

    def _are_blocks(self, columns: range) -> bool:
        """Whether these columns are whole blocks of a GGUF type."""
        size = block_columns(self._stored_dtype)
        return size > 1 and columns.start % size == columns.stop % size == 0

    def _rows(self, rows: slice) -> range:
        """The matrix's, from the piece's."""
        if self.piece.rows is not None:
            return self.piece.rows[rows]
        return range(self.shape[0])[rows]

    def _stored_rows(self, read: Any, rows: range) -> np.ndarray:
        name, matrix = self.piece.name, self.piece.matrix
        values: np.ndarray
        if matrix is not None:
            values = read(name, slice(matrix, matrix + 1))[0]
            return values[_slice(rows)]
        values = read(name, slice(rows.start, rows.stop))
        return values if rows.step == 1 else values[:: rows.step]


def block_columns(dtype: str) -> int:
    """Columns of a row that a GGUF type of this name stores together; 1 of other dtypes."""
    return BLOCK_FORMATS[dtype].elements if dtype in BLOCK_FORMATS else 1


def _slice(of: range) -> slice:
    return slice(of.start, of.stop, of.step)


def _text(of: range | None) -> str:
    if of is None:
        return ":"
    return f"{of.start}:{of.stop}" if of.step == 1 else f"{of.start}:{of.stop}:{of.step}"


@dataclass(frozen=True)
class _Rows:
    """A `GroupedTensor`: rows of another."""

    tensor: GroupedTensor
    rows: range

    @property
    def layout(self) -> GroupedLayout:
        return self.tensor.layout

    @property
    def input_order(self) -> np.ndarray | None:
        return self.tensor.input_order

    def read(self, rows: slice) -> GroupedRows:
        wanted = self.rows[rows]
        whole = self.tensor.read(slice(wanted.start, wanted.stop))
        parts = {name: part for name, part in whole._asdict().items() if part is not None}
        return whole._replace(**{name: part[:: wanted.step] for name, part in parts.items()})
