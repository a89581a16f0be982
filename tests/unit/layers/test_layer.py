"""Weights narrowed to some of their rows or columns read what numpy would slice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvariantError
from octavo.layers.layer import Piece, Weight
from octavo.models.stored_piece import StoredPiece
from octavo.quantization.grouped import GroupedTensor
from octavo.weights.checkpoint import TensorSpec


class Arrays:
    """A `Checkpoint` of arrays."""

    name = "arrays"

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.tensors = {
            name: TensorSpec(name, array.shape, array.dtype.name) for name, array in arrays.items()
        }

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self.arrays[name][slice(None) if rows is None else rows]

    read_stored = read

    def grouped(self, name: str) -> GroupedTensor | None:
        return None

    def content_id(self) -> str:
        return "arrays"


def values_of(weight: Weight, checkpoint: Arrays) -> np.ndarray:
    parts = [StoredPiece(checkpoint, piece).read(slice(None)) for piece in weight.pieces]
    return np.concatenate(parts)


@st.composite
def parts(draw: st.DrawFn, size: int, *, steps: bool) -> range | None:
    """Some of `size` things side by side, or each second or third; None is all of them."""
    if draw(st.booleans()):
        return None
    step = draw(st.integers(1, 3)) if steps else 1
    first = draw(st.integers(0, size - 1))
    return range(first, draw(st.integers(first + 1, size)), step)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Weight, Arrays]:
    """Of several pieces, each as families have them, which agree in the number of columns."""
    num_columns = draw(st.integers(1, 6))
    pieces, arrays = [], {}
    for number in range(draw(st.integers(1, 4))):
        name = f"tensor {number}"
        num_rows, width = draw(st.integers(1, 8)), draw(st.integers(num_columns, 8))
        rows = draw(parts(num_rows, steps=True))
        first = draw(st.integers(0, width - num_columns))
        columns = None if width == num_columns else range(first, first + num_columns)
        is_transposed = draw(st.booleans())
        matrix = draw(st.none() | st.integers(0, 2))
        shape: tuple[int, ...] = (width, num_rows) if is_transposed else (num_rows, width)
        if matrix is not None:
            shape = (3, *shape)
        pieces.append(Piece(name, shape, matrix, is_transposed, rows, columns))
        arrays[name] = np.random.default_rng(number).normal(size=shape).astype(np.float32)
    total = sum(piece.part_shape[0] for piece in pieces)
    weight = Weight(shape=(total, num_columns), role="matrix", dtype="float32", pieces=pieces)
    return weight, Arrays(arrays)


@given(weights(), st.data())
def test_rows_are_those_that_numpy_takes(made: tuple[Weight, Arrays], data: st.DataObject) -> None:
    weight, checkpoint = made
    expected = values_of(weight, checkpoint)
    for _ in range(2):  # of what is narrow already, too
        count = weight.shape[0]
        ranges = data.draw(st.lists(parts(count, steps=False), min_size=1, max_size=3))
        wanted = [range(count) if part is None else part for part in ranges]
        weight.take_rows(wanted)
        expected = np.concatenate([expected[part.start : part.stop] for part in wanted])
        assert weight.shape == expected.shape
        np.testing.assert_array_equal(values_of(weight, checkpoint), expected)
    assert (weight.role, weight.dtype) == ("matrix", "float32")


@given(weights(), st.data())
def test_columns_are_those_that_numpy_takes(
    made: tuple[Weight, Arrays], data: st.DataObject
) -> None:
    weight, checkpoint = made
    expected = values_of(weight, checkpoint)
    for _ in range(2):
        part = data.draw(parts(weight.shape[1], steps=False)) or range(weight.shape[1])
        weight.take_columns(part)
        expected = expected[:, part.start : part.stop]
        assert weight.shape == expected.shape
        np.testing.assert_array_equal(values_of(weight, checkpoint), expected)


def test_vectors_have_elements_in_place_of_rows() -> None:
    arrays = {"a": np.arange(4.0), "b": np.arange(10.0, 16.0)}
    weight = Weight("a", "b", shape=(10,), role="vector", rows=(4, 6))
    weight.take_rows([range(2, 6), range(8, 10)])
    assert values_of(weight, Arrays(arrays)).tolist() == [2, 3, 10, 11, 14, 15]


def test_elements_of_one_vector_of_several() -> None:
    arrays = {"a": np.arange(12.0).reshape(3, 4)}
    weight = Weight(shape=(4,), role="vector", pieces=[Piece("a", (3, 4), 1)])
    weight.take_rows([range(1, 3)])
    assert values_of(weight, Arrays(arrays)).tolist() == [5, 6]


def test_pieces_of_which_nothing_is_taken_are_not_read() -> None:
    weight = Weight("a", "b", "c", shape=(6, 5), role="matrix")
    weight.take_rows([range(1, 4)])
    assert weight.names == ("a", "b")


@pytest.mark.parametrize("rows", [range(0), range(3, 7), range(-1, 2), range(0, 6, 2)])
def test_rows_that_are_not_there(rows: range) -> None:
    with pytest.raises(InvariantError, match="has no rows"):
        Weight("a", shape=(6, 5), role="matrix").take_rows([rows])


def test_columns_that_are_not_there() -> None:
    with pytest.raises(InvariantError, match="has no columns"):
        Weight("a", shape=(6, 5), role="matrix").take_columns(range(3, 6))
