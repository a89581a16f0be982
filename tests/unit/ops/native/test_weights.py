"""Which format a weight gets, and whole plans."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo import machine, ops
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops.backend import WeightRequest, load_backend
from octavo.ops.native import weight_cache, weights
from octavo.ops.native.array import NativeArray
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weight_formats import held_parts
from octavo.ops.native.weights import PackedWeight, StackedWeight
from octavo.quantization.grouped import GroupedLayout
from support.grouped_arrays import GroupedArray
from support.panels import groups_of, unpack
from support.stored_arrays import MemoryArray, request

BACKEND = NativeBackend()
HEAD = ("table", "head")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def format_of(request: WeightRequest, dtype: str, quantization: str | None) -> str:
    """Of its matrices, from the first row on."""
    held = held_parts(request, dtype, quantization)
    assert held is not None
    return " + ".join(str(format) for format, _ in groupby(one.format for one in held))


def stored_as(*dtypes: str, roles: Any = ("matrix",)) -> WeightRequest:
    """A weight of parts in these types; the values don't matter."""
    parts = tuple(MemoryArray(np.zeros((1, 1), np.float32), dtype) for dtype in dtypes)
    return WeightRequest(parts, (len(parts), 32), roles)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float32"], "float32"),
        (["bfloat16"] * 3, "bfloat16"),
        (["float16"] * 2, "float16"),
        (["bfloat16", "float16"], "bfloat16 + float16"),
        (["bfloat16", "float32", "float32"], "bfloat16 + float32"),
        (["float64"], "float32"),
        (["float8_e4m3fn"], "float32"),
        (["Q8_0"] * 2, "int8"),
        (["Q4_0"] * 3, "int4"),
        (["Q4_1"], "int4 with minimum"),
        (["Q4_0", "Q4_1", "Q4_0"], "int4 with minimum"),
        (["Q4_1", "Q8_0"], "int4 with minimum + int8"),
        (["Q8_0", "float16", "Q8_0"], "int8 + float16 + int8"),
        (["Q5_0", "Q8_0"], "int8"),
        (["Q5_1"], "int8 with minimum, float32 scales"),
        (["Q2_K"], "int4 with minimum in groups of 16, int8 scales"),
        (["Q3_K"], "int4 in groups of 16, int8 scales"),
        (["Q5_K"], "int8 with minimum, int8 scales"),
        (
            ["Q4_K", "Q4_K", "Q6_K"],
            "int4 with minimum, int8 scales + int8 in groups of 16, int8 scales",
        ),
    ],
)
def test_nothing_is_lost_of_what_is_stored(dtypes: list[str], expected: str) -> None:
    assert format_of(stored_as(*dtypes), "stored", None) == expected


@pytest.mark.parametrize("roles", [HEAD, ("table",)])
def test_a_table_is_one_matrix(roles: Any) -> None:
    assert format_of(stored_as("Q6_K", roles=roles), "stored", None) == (
        "int8 in groups of 16, int8 scales"
    )
    assert format_of(stored_as("Q8_0", "bfloat16", roles=roles), "stored", None) == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_is_that_of_every_matrix(dtype: str) -> None:
    for stored in ("float32", "bfloat16", "Q4_1", "Q8_0"):
        assert format_of(stored_as(stored), dtype, None) == dtype


@pytest.mark.parametrize(
    ("dtypes", "roles", "quantization", "expected"),
    [
        (["bfloat16"], ("matrix",), "int8", "int8"),
        (["Q4_1"], ("matrix",), "int8", "int8"),
        (["bfloat16"], HEAD, "int8", "int8"),
        (["float32"], ("matrix",), "int4", "int4 with minimum"),
        (["Q4_0"], ("matrix",), "int4", "int4"),
        (["Q4_0", "Q4_1"], ("matrix",), "int4", "int4 with minimum"),
        (["Q8_0"], ("matrix",), "int4", "int4 with minimum"),
        (["float32"], HEAD, "int4", "int8"),
        (["Q8_0"], HEAD, "int4", "int8"),
        (["Q4_1"], HEAD, "int4", "int4 with minimum"),
        (["float32"], ("table",), "int4", "int8"),
        (["float32"], ("head",), "int4", "int8"),
        (["float32"], ("matrix",), "int8-channel", "int8 by channel"),
        (["bfloat16"], ("matrix",), "fp8", "fp8"),
        (["Q8_0"], ("matrix",), "fp8", "fp8"),
        (["bfloat16"], HEAD, "fp8", "int8"),
        (["float32"], HEAD, "int8-g64", "int8 in groups of 64"),
        (["float32"], HEAD, "int4-sym-g64", "int8"),
        (["Q4_0"], ("matrix",), "int8-g128", "int8 in groups of 128"),
        (["Q8_0"], ("matrix",), "int8-channel", "int8"),
        (["Q4_1"], ("matrix",), "int4-sym-g128", "int4 with minimum"),
        (["Q8_0", "float16"], ("matrix",), "int4-g64", "int4 with minimum in groups of 64"),
        (["Q4_K"], ("matrix",), "int4", "int4 with minimum, int8 scales"),
        (["Q6_K"], ("matrix",), "int4", "int4 with minimum"),
        (["Q6_K"], ("matrix",), "int8", "int8 in groups of 16, int8 scales"),
        (["Q4_K", "Q6_K"], ("matrix",), "int8", "int8 + int8 in groups of 16, int8 scales"),
    ],
)
def test_quantization(dtypes: list[str], roles: Any, quantization: str, expected: str) -> None:
    for dtype in ("stored", "bfloat16"):
        assert format_of(stored_as(*dtypes, roles=roles), dtype, quantization) == expected


@pytest.mark.parametrize(
    ("quantization", "kind", "has_min", "group_size"),
    [
        ("int8", "q8", False, 32),
        ("int8-g64", "q8", False, 64),
        ("int8-g128", "q8", False, 128),
        ("int8-channel", "q8", False, 320),
        ("int4", "q4", True, 32),
        ("int4-g64", "q4", True, 64),
        ("int4-g128", "q4", True, 128),
        ("int4-sym", "q4", False, 32),
        ("int4-sym-g64", "q4", False, 64),
        ("int4-sym-g128", "q4", False, 128),
    ],
)
def test_a_scale_is_of_as_many_weights_as_asked(
    quantization: str, kind: str, has_min: bool, group_size: int
) -> None:
    (packed,) = load([request(MemoryArray.of(normal(20, 320)))], quantization=quantization)
    assert packed.format[:2] == (kind, "min" if has_min else None)
    _, scales, mins, _ = groups_of(packed)
    for kept in (scales,) if mins is None else (scales, mins):
        changes = (kept[:, 1:] != kept[:, :-1]).all(axis=0)
        assert np.flatnonzero(changes).tolist() == [
            group - 1 for group in range(1, 10) if 32 * group % group_size == 0
        ]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_vectors_are_float32(quantization: str | None) -> None:
    assert held_parts(stored_as("bfloat16", roles=("vector",)), "stored", quantization) is None


def load(requests: list[WeightRequest], **options: Any) -> list[Any]:
    plan = BACKEND.plan_weights(requests, **({"dtype": "stored"} | options))
    loaded = list(plan.load())
    for arrays, name, num_bytes in zip(loaded, plan.formats, plan.num_bytes, strict=True):
        for array in arrays:
            if isinstance(array, NativeArray):
                assert name == "float32"
                assert num_bytes == -(-array.values.nbytes // 64) * 64
                continue
            packed = array.parts if isinstance(array, StackedWeight) else [array]
            assert " + ".join(str(one.format) for one in packed) == name
            assert sum(one.data.nbytes for one in packed) == num_bytes
            assert all(one.data.ctypes.data % 64 == 0 for one in packed)
    return [arrays[0] for arrays in loaded]


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each job."""
    monkeypatch.setattr(weights, "_JOB_BYTES", 1)


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 0.0), ({"dtype": "float16"}, 0.002), ({"quantization": "int8"}, 0.02)],
)
def test_parts_are_stacked_whatever_their_rows_and_types(
    options: dict[str, str], tolerance: float
) -> None:
    """No part ends where a panel does."""
    values = [normal(rows, 96, seed=rows) for rows in (41, 5, 30)]
    types = [None, "Q4_1", "Q8_0"]
    parts = [MemoryArray.of(v, t) for v, t in zip(values, types, strict=True)]
    (packed,) = load([request(*parts)], **options)
    expected = np.concatenate([part.values for part in parts])
    np.testing.assert_allclose(unpack(packed), expected, rtol=0, atol=tolerance)


def test_matrices_of_several_formats_are_one_weight() -> None:
    """A Q4_K matrix above a Q6_K one, as query, key and value often are."""
    parts = [
        MemoryArray.of_random_blocks("Q4_K", 21, 256),
        MemoryArray.of_random_blocks("Q6_K", 33, 256),
        MemoryArray.of(normal(16, 256).astype(np.float16)),
    ]
    (weight,) = load([request(*parts)])
    assert isinstance(weight, StackedWeight)
    expected = np.concatenate([part.values.astype(np.float32) for part in parts])
    np.testing.assert_array_equal(unpack(weight), expected)

    BACKEND.choose("float32", {})
    x, bias = normal(3, 256), normal(70)
    added = BACKEND.from_host(bias)

    def products(x: Any) -> tuple[Any, ...]:
        return ops.linear(x, weight, added), *(ops.linear(x, part) for part in weight.parts)

    whole, *alone = map(BACKEND.to_host, BACKEND.compile(products)(BACKEND.from_host(x)))
    np.testing.assert_array_equal(whole, np.concatenate(alone, axis=1) + bias)


def test_inputs_in_another_order() -> None:
    """As GPTQ's desc_act has them; equal orders are one array."""
    order = np.random.default_rng(0).permutation(96)
    parts = [
        replace(GroupedArray.random(GroupedLayout("int8"), 20, 96, seed), input_order=order.copy())
        for seed in range(2)
    ]
    first, second = load([request(part) for part in parts])
    assert first.order is second.order
    np.testing.assert_array_equal(unpack(first), parts[0].read(slice(None))[:, order])

    BACKEND.choose("float32", {})
    x = normal(3, 96)
    actual = BACKEND.compile(lambda x: ops.linear(x, first))(BACKEND.from_host(x))
    plain = PackedWeight(first.format, first.shape, first.data, first.panel_stride)
    expected = BACKEND.compile(lambda x: ops.linear(x, plain))(BACKEND.from_host(x[:, order]))
    np.testing.assert_array_equal(BACKEND.to_host(actual), BACKEND.to_host(expected))


def test_every_weight_of_a_model_in_its_place() -> None:
    matrices = [normal(rows, 70, seed=rows) for rows in (16, 1, 50)]
    norms = [normal(size, seed=size) for size in (5, 70)]
    bias = [normal(size).astype(ml_dtypes.bfloat16) for size in (3, 8)]
    requests = [
        request(MemoryArray.of(matrices[0])),
        request(MemoryArray.of(norms[0]), roles=("vector",), dtype="float32", offset=1.0),
        request(*map(MemoryArray.of, matrices[1:])),
        request(*map(MemoryArray.of, bias), roles=("vector",)),
        request(MemoryArray.of(norms[1]), roles=("vector",), dtype="float32"),
    ]
    first, norm, second, biases, last = load(requests)
    np.testing.assert_array_equal(unpack(first), matrices[0])
    np.testing.assert_array_equal(unpack(second), np.concatenate(matrices[1:]))
    assert isinstance(norm, NativeArray)
    np.testing.assert_array_equal(norm.values, norms[0] + np.float32(1.0))
    np.testing.assert_array_equal(biases.values, np.concatenate(bias).astype(np.float32))
    np.testing.assert_array_equal(last.values, norms[1])


def test_other_dtypes_come_as_float32() -> None:
    values = normal(4, 6).astype(np.float64)
    (packed,) = load([request(MemoryArray.of(values))])
    np.testing.assert_array_equal(unpack(packed), values.astype(np.float32))


def test_tied_weights_are_one() -> None:
    plan = BACKEND.plan_weights(
        [request(MemoryArray.of(normal(20, 8)), roles=HEAD)], dtype="stored"
    )
    ((table, head),) = plan.load()
    assert table is head


def test_an_error_of_a_reader_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise ConfigError("gone")

    monkeypatch.setattr(MemoryArray, "read", read)
    plan = BACKEND.plan_weights([request(MemoryArray.of(normal(20, 8)))] * 3, dtype="stored")
    with pytest.raises(ConfigError, match="gone"):
        list(plan.load())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is read while a cache of the test's own keeps small models, too."""
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    names: list[str] = []
    read = MemoryArray.read

    def recorded(part: MemoryArray, rows: slice) -> np.ndarray:
        names.append(part.name)
        return read(part, rows)

    monkeypatch.setattr(MemoryArray, "read", recorded)
    return names


def start(value: float, source: str | None = "s", **options: Any) -> list[np.ndarray]:
    """Load a matrix and a vector as a program would, and wait until they are on disk."""
    matrix, vector = np.full((3, 32), value, np.float32), np.full(5, value, np.float32)
    requests = [
        request(MemoryArray.of(matrix, name="matrix")),
        request(MemoryArray.of(vector, name="vector"), roles=("vector",), dtype="float32"),
    ]
    packed, norm = load(requests, source=source, **options)
    for thread in threading.enumerate():
        if thread.name == "octavo-weight-cache":
            thread.join()
    return [unpack(packed)[0, 0], norm.values[0]]


def test_a_second_start_reads_nothing(reads: list[str]) -> None:
    assert start(1.5) == [1.5, 1.5]
    assert sorted(reads) == ["matrix", "vector"]
    reads.clear()
    assert start(0.0) == [1.5, 1.5]  # the same source: what it says now isn't looked at
    assert reads == []


@pytest.mark.parametrize("other", [{"source": "t"}, {"source": None}, {"dtype": "bfloat16"}])
def test_another_start_reads_again(reads: list[str], other: dict[str, Any]) -> None:
    start(1.5)
    reads.clear()
    assert start(2.5, **other) == [2.5, 2.5]
    assert sorted(reads) == ["matrix", "vector"]


def test_another_size_of_groups_reads_again(reads: list[str]) -> None:
    start(1.5, quantization="int8")
    reads.clear()
    start(1.5, quantization="int8-channel")
    assert sorted(reads) == ["matrix", "vector"]


def test_a_changed_layout_reads_again(reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start(1.5)
    reads.clear()
    monkeypatch.setattr(weights, "_LAYOUT", weights._LAYOUT + 1)
    assert start(2.5) == [2.5, 2.5]
    assert reads


def test_without_a_home_nothing_is_kept(
    reads: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(machine, "cache_root", no_home)
    with caplog.at_level(logging.INFO):
        assert start(1.5) == start(1.5) == [1.5, 1.5]
    assert len(reads) == 4
    assert "set OCTAVO_CACHE_ROOT" in caplog.text


def test_names_of_dtypes() -> None:
    assert BACKEND.resolve_dtype("auto", "bfloat16")[0] == "stored"
    assert BACKEND.resolve_dtype("half", "bfloat16")[0] == "float16"
    with pytest.raises(ConfigError, match="--dtype 'int3' is unknown"):
        BACKEND.resolve_dtype("int3", "bfloat16")


def test_the_cache_is_float32_for_float32_weights_alone() -> None:
    wide, narrow = normal(2, 8), normal(2, 8).astype(ml_dtypes.bfloat16)
    norm = request(MemoryArray.of(normal(8)), roles=("vector",), dtype="float32")
    for matrix, expected in ((wide, "float32"), (narrow, "bfloat16")):
        plan = BACKEND.plan_weights([request(MemoryArray.of(matrix)), norm], dtype="stored")
        assert BACKEND.resolve_kv_dtype("auto", "stored", plan)[0] == expected
    assert BACKEND.resolve_kv_dtype("fp8", "stored", plan)[0] == "fp8"
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype float16.*lacks it; use one of auto"):
        BACKEND.resolve_kv_dtype("float16", "stored", plan)


@pytest.mark.parametrize(
    ("dtype", "block_size", "num_bytes"),
    [
        ("float32", 16, 2 * 16 * 64 * 4),
        ("bfloat16", 16, 2 * 16 * 64 * 2),
        ("fp8", 32, 2 * 32 * 64),
        ("int8", 32, 2 * 32 * 64 + 2 * 32 * 4),
        ("fp8", 8, 2 * 16 * 64),  # tokens are padded to 16
        ("int4", 32, 2 * 32 * 64 // 2 + 2 * 32 * 4),
        ("int8,int4", 16, 16 * 64 + 16 * 64 // 2 + 2 * 16 * 4),
        ("bfloat16,fp8", 16, 16 * 64 * 2 + 16 * 64),
    ],
)
def test_memory_of_a_kv_block(dtype: str, block_size: int, num_bytes: int) -> None:
    layers = [(3, 64), (3, 64)]
    assert BACKEND.kv_block_bytes(block_size, layers, KVFormat(dtype)) == 6 * num_bytes


@pytest.mark.parametrize("dtype", ["int4", "int8,int4", "bfloat16,fp8"])
def test_latent_vectors_have_one_format_and_no_int4(dtype: str) -> None:
    layers = [LatentShape(32, 16)]
    assert BACKEND.kv_block_bytes(16, layers, KVFormat("fp8")) == 16 * (32 + 16)
    remedy = f"--kv-cache-dtype {dtype}: .* one latent vector .* auto, float32, bfloat16, int8, fp8"
    with pytest.raises(ConfigError, match=remedy):
        BACKEND.kv_block_bytes(16, layers, KVFormat(dtype))
    with pytest.raises(ConfigError, match=remedy):
        BACKEND.allocate_kv(1, 16, layers, KVFormat(dtype))


def test_a_backend_for_the_device() -> None:
    assert load_backend("auto", device="cpu").name == "native"
    assert load_backend("native").device == "cpu"
    with pytest.raises(ConfigError, match="computes on CPUs, not on 'cuda'"):
        load_backend("native", device="cuda")
    with pytest.raises(ConfigError, match="unknown backend 'jax'"):
        load_backend("jax")
