"""Parts of quantized matrices, as two ranks of tensor parallelism hold them, make the whole.

A rank has some outputs of a matrix, or some inputs, cut between groups, and reads these alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.layers.layer import Layer, Piece, Weight
from octavo.models.loader import load_weights, plan_weights
from octavo.ops import linear
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import make_checkpoint
from support.quantized_files import CASES, quantize_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
X = np.random.default_rng(5).normal(size=(5, 64)).astype(np.float32)


class Part(Layer):
    """Some rows, or columns, of one matrix of a checkpoint."""

    family, ignored, renames = "part", ("*",), ()

    def __init__(self, checkpoint: Checkpoint, name: str, **part: range) -> None:
        piece = Piece(name, checkpoint.tensors[name].shape, **part)
        self.weight = Weight(shape=piece.part_shape, role="matrix", pieces=[piece])


def loaded(part: Part, checkpoint: Checkpoint, backend: str) -> tuple[np.ndarray, str]:
    """Its products with X, or with the columns of X that are its inputs; its format."""
    dtype = "stored" if backend == "native" else "float32"
    on = cpu_backend(backend)
    plan = plan_weights(part, checkpoint, on, dtype)
    load_weights(part, plan)
    inputs = part.weight.pieces[0].columns or range(part.weight.shape[1])
    rows = np.ascontiguousarray(X[:, inputs.start : inputs.stop])
    return on.to_host(on.compile(linear)(on.from_host(rows), part.weight.array)), plan.formats[
        0
    ].partition(" (")[0]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_shared_out(original: Path, tmp_path: Path, case: str, backend: str) -> None:
    checkpoint = open_checkpoint(str(quantize_checkpoint(CASES[case], original, tmp_path)[0]))
    whole, held = loaded(Part(checkpoint, UP), checkpoint, backend)
    halves = [
        loaded(Part(checkpoint, UP, rows=rows), checkpoint, backend)
        for rows in (range(48), range(48, 96))
    ]
    np.testing.assert_array_equal(np.concatenate([y for y, _ in halves], axis=1), whole)
    assert {format for _, format in halves} == {held}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_inputs_are_shared_out(original: Path, tmp_path: Path, case: str, backend: str) -> None:
    checkpoint = open_checkpoint(str(quantize_checkpoint(CASES[case], original, tmp_path)[0]))
    whole, held = loaded(Part(checkpoint, OUT), checkpoint, backend)
    halves = [
        loaded(Part(checkpoint, OUT, columns=columns), checkpoint, backend)
        for columns in (range(32), range(32, 64))
    ]
    total = np.sum([y for y, _ in halves], axis=0)
    if "desc_act" not in case:  # whose groups lie scattered over the row: floats for halves
        np.testing.assert_allclose(total, whole, atol=2e-6 * np.abs(whole).max() + 1e-6)
        assert {format for _, format in halves} == {held}
    exact = X @ checkpoint.read(OUT).T
    off = np.linalg.norm(total - exact) / np.linalg.norm(exact)
    assert off < (1e-5 if held == "float32" else 0.01)
