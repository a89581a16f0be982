"""A checkpoint that doesn't fit its config is refused by name, before anything is read (MDL-09)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.layers.layer import Layer, Piece, Weight
from octavo.layers.linear import Linear
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import load_weights, make_rope_tables, plan_weights
from octavo.models.registry import build_model
from octavo.ops import linear
from octavo.weights import TensorSpec
from support.backends import BACKENDS, cpu_backend, torch_backend
from support.configs import LLAMA


class MemoryCheckpoint:
    """Tensors in memory."""

    name = "memory"

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.num_reads = 0

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        return {n: TensorSpec(n, a.shape, a.dtype.name) for n, a in self.arrays.items()}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        self.num_reads += 1
        return self.arrays[name][rows or slice(None)]

    read_stored = read

    def grouped(self, name):
        return None

    def content_id(self) -> str:
        return "memory"


def load(model: CausalLM, checkpoint: MemoryCheckpoint, dtype: str = "float32") -> None:
    load_weights(model, plan_weights(model, checkpoint, torch_backend(), dtype))


@pytest.fixture
def checkpoint() -> MemoryCheckpoint:
    rng = np.random.default_rng(0)
    weights = build_model(LLAMA).weights()
    parts = [part for weight in weights for part in weight.parts()]
    return MemoryCheckpoint({n: rng.normal(size=s).astype(np.float32) for n, s in parts})


def refusal(checkpoint: MemoryCheckpoint) -> str:
    with pytest.raises(ConfigError) as error:
        load(build_model(LLAMA), checkpoint)
    assert checkpoint.num_reads == 0
    return str(error.value)


def test_fused_projections_are_stacked_in_order(checkpoint: MemoryCheckpoint) -> None:
    model = build_model(LLAMA)
    load(model, checkpoint)
    names = [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"]
    fused = torch_backend().to_host(model.blocks[1].attention.qkv.weight.array)
    assert np.array_equal(fused, np.concatenate([checkpoint.arrays[n] for n in names]))
    assert fused.shape == (64 + 32 + 32, 64)


def test_a_weight_may_be_some_columns_of_wider_tensors(checkpoint: MemoryCheckpoint) -> None:
    class Halves(Layer):
        family, ignored, renames = "halves", ("*",), ()

        def __init__(self) -> None:
            self.left = Linear({"a": 3, "b": 2}, 4, columns=(0, 10))
            self.right = Linear({"a": 3, "b": 2}, 6, columns=(4, 10))

    rng = np.random.default_rng(0)
    for name, rows in (("a", 3), ("b", 2)):
        checkpoint.arrays[f"{name}.weight"] = rng.normal(size=(rows, 10)).astype(np.float32)
    halves = Halves()
    load_weights(halves, plan_weights(halves, checkpoint, torch_backend(), "float32"))
    whole = np.concatenate([checkpoint.arrays["a.weight"], checkpoint.arrays["b.weight"]])
    assert np.array_equal(torch_backend().to_host(halves.left.weight.array), whole[:, :4])
    assert np.array_equal(torch_backend().to_host(halves.right.weight.array), whole[:, 4:])

    checkpoint.arrays["b.weight"] = checkpoint.arrays["b.weight"][:, :6]
    with pytest.raises(ConfigError, match=r"b.weight is \[2, 6\] instead of \[2, 10\]"):
        plan_weights(halves, checkpoint, torch_backend(), "float32")


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (Piece("x", (4, 6, 10), matrix=2), lambda x: x[2]),
        (Piece("x", (4, 6, 10), matrix=1, rows=range(1, 6, 2)), lambda x: x[1][1::2]),
        (Piece("x", (4, 6, 10), matrix=3, is_transposed=True), lambda x: x[3].T),
        (
            Piece("x", (4, 6, 10), 3, is_transposed=True, rows=range(0, 10, 2)),
            lambda x: x[3].T[::2],
        ),
        (Piece("y", (24, 10), rows=range(4, 9)), lambda x: x.reshape(24, 10)[4:9]),
        (
            Piece("y", (24, 10), is_transposed=True, columns=range(3, 8), rows=range(2, 10)),
            lambda x: x.reshape(24, 10)[3:8].T[2:],
        ),
    ],
)
def test_a_weight_may_be_made_of_pieces_of_tensors(
    piece: Piece, expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    class Parts(Layer):
        family, ignored, renames = "parts", ("*",), ()

        def __init__(self) -> None:
            rows, *rest = piece.part_shape
            self.twice = Weight(shape=(2 * rows, *rest), role="matrix", pieces=[piece, piece])

    array = np.random.default_rng(0).normal(size=(4, 6, 10)).astype(np.float32)
    checkpoint = MemoryCheckpoint({"x": array, "y": array.reshape(24, 10)})
    parts = Parts()
    matrix = expected(array)
    for backend in map(cpu_backend, BACKENDS):
        load_weights(parts, plan_weights(parts, checkpoint, backend, "float32"))
        unit = backend.from_host(np.eye(matrix.shape[1], dtype=np.float32))
        product = backend.to_host(backend.compile(linear)(unit, parts.twice.array))
        assert np.array_equal(product.T, np.concatenate([matrix, matrix]))


def test_norms_stay_in_float32_and_get_their_offset(checkpoint: MemoryCheckpoint) -> None:
    model = build_model(LLAMA)
    model.norm.weight.offset = 1.0
    load(model, checkpoint, "bfloat16")
    norm = torch_backend().to_host(model.norm.weight.array)
    assert norm.dtype == np.float32
    assert np.array_equal(norm, checkpoint.arrays["model.norm.weight"] + np.float32(1.0))
    assert torch_backend().to_host(model.embedding.table.array).dtype.name == "bfloat16"


def test_rotary_tables_have_the_length_asked_for() -> None:
    model = build_model(LLAMA)
    make_rope_tables(model, torch_backend(), 40)
    assert model.rope_tables()[0].array.shape == (40, 16)


def test_a_tied_tensor_is_read_once_for_both_its_roles(checkpoint: MemoryCheckpoint) -> None:
    model = build_model(LLAMA | {"tie_word_embeddings": True})
    load(model, checkpoint, "bfloat16")
    table, matrix = model.embedding.table, model.head.weight
    assert (table.role, matrix.role) == ("table", "head")
    assert table.array is matrix.array
    assert checkpoint.num_reads == len(checkpoint.arrays) - 1  # all but lm_head.weight


def test_weight_bytes_before_loading(checkpoint: MemoryCheckpoint) -> None:
    model = build_model(LLAMA)
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2)):
        plan = plan_weights(model, checkpoint, torch_backend(), dtype)
        in_norms = 64 * (2 * len(model.spec.layers) + 1)  # norms stay in float32
        expected = num_bytes * (model.spec.num_parameters - in_norms) + 4 * in_norms
        assert sum(plan.num_bytes) == expected
        assert set(plan.formats) == {dtype, "float32"}


def test_progress_ends_at_the_total(checkpoint: MemoryCheckpoint) -> None:
    calls: list[tuple[int, int]] = []
    model = build_model(LLAMA)

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    plan = plan_weights(model, checkpoint, torch_backend(), "float32")
    assert checkpoint.num_reads == 0
    load_weights(model, plan, progress)
    assert calls == sorted(calls)
    assert calls[-1] == (4 * model.spec.num_parameters,) * 2


def test_a_missing_tensor_is_named(checkpoint: MemoryCheckpoint) -> None:
    del checkpoint.arrays["model.layers.1.mlp.up_proj.weight"]
    assert "missing: model.layers.1.mlp.up_proj.weight." in refusal(checkpoint)


def test_many_missing_tensors_are_counted(checkpoint: MemoryCheckpoint) -> None:
    gone = [name for name in checkpoint.arrays if ".layers.1." in name]
    for name in gone:
        del checkpoint.arrays[name]
    assert f"{gone[4]} ... and {len(gone) - 5} more" in refusal(checkpoint)


def test_an_unexpected_tensor_is_named(checkpoint: MemoryCheckpoint) -> None:
    checkpoint.arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    assert "unexpected: model.layers.0.self_attn.q_proj.bias." in refusal(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: MemoryCheckpoint) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    checkpoint.arrays[name] = np.zeros((16, 64), np.float32)
    assert f"wrong shape: {name} is [16, 64] instead of [32, 64]." in refusal(checkpoint)


def test_parts_of_a_fused_weight_are_checked_one_by_one(checkpoint: MemoryCheckpoint) -> None:
    """Rows that one projection lacks and the other has too many of."""
    for name, rows in (("q", 80), ("k", 16)):
        checkpoint.arrays[f"model.layers.0.self_attn.{name}_proj.weight"] = np.zeros(
            (rows, 64), np.float32
        )
    message = refusal(checkpoint)
    assert "q_proj.weight is [80, 64] instead of [64, 64]" in message
    assert "k_proj.weight is [16, 64] instead of [32, 64]" in message


def test_copies_and_derived_buffers_are_ignored(checkpoint: MemoryCheckpoint) -> None:
    checkpoint.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    load(build_model(LLAMA), checkpoint)
    tied = build_model(LLAMA | {"tie_word_embeddings": True})
    load(tied, checkpoint)  # has lm_head.weight as well
