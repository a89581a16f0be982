"""Memory, transfers and decisions of the torch backend."""

from __future__ import annotations

import threading
from typing import cast

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo import ops
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.ops.torch.backend import TorchBackend
from octavo.ops.torch.batch import TorchKVLayer
from support.backends import torch_backend
from support.forward import host_batch
from support.stored_arrays import load_weight

BACKEND = cast(TorchBackend, torch_backend())


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, np.int64, np.int32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn],
)
def test_arrays_come_back_as_they_went(dtype: type) -> None:
    array = np.array([[0, 1, -2], [0.5, 3, 8]]).astype(dtype)
    back = BACKEND.to_host(BACKEND.from_host(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back.astype(np.float32), array.astype(np.float32))


def test_conversion_on_the_way() -> None:
    array = np.array([1.0, 1 / 3, -7.25]).astype(ml_dtypes.bfloat16)
    (wide,) = load_weight(BACKEND, array, dtype="float32")
    assert np.array_equal(BACKEND.to_host(wide), array.astype(np.float32))
    (narrow,) = load_weight(BACKEND, np.ones(3), "vector", dtype="bfloat16")
    assert BACKEND.to_host(narrow).dtype == ml_dtypes.bfloat16


def test_tied_weights_take_memory_once() -> None:
    table, matrix = load_weight(BACKEND, np.ones((3, 2)), "table", "head", dtype="bfloat16")
    assert table.data_ptr() == matrix.data_ptr()


def test_weights_are_not_quantized() -> None:
    with pytest.raises(ConfigError, match=r"--quantization int8.*--backend native"):
        load_weight(BACKEND, np.ones((3, 2)), dtype="float32", quantization="int8")


def test_the_cache_has_the_models_dtype() -> None:
    plan = BACKEND.plan_weights([], dtype="bfloat16")
    assert BACKEND.resolve_kv_dtype("auto", "bfloat16", plan)[0] == "bfloat16"
    assert BACKEND.resolve_kv_dtype("float32", "float32", plan)[0] == "float32"
    for asked in ("int8", "fp8", "float32"):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {asked}.*here bfloat16"):
            BACKEND.resolve_kv_dtype(asked, "bfloat16", plan)


def test_memory_of_a_kv_block() -> None:
    layers = [(2, 24), (1, 8)]
    assert BACKEND.kv_block_bytes(16, layers, KVFormat("bfloat16")) == 2 * 16 * (48 + 8) * 2


def test_read_only_arrays_are_copied() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    tensor = BACKEND.from_host(array)
    tensor += 1
    assert array[0] == 0.0


def test_kv_cache_starts_at_zero_with_a_shape_for_each_layer() -> None:
    layers = BACKEND.allocate_kv(3, 16, [(2, 24), (1, 8)], KVFormat("bfloat16"))
    for layer, heads in zip(layers, [(2, 24), (1, 8)], strict=True):
        assert isinstance(layer, TorchKVLayer)
        for array in (layer.keys, layer.values):
            assert array.shape == (3, 16, *heads)
            assert not array.any()


def test_a_kv_cache_larger_than_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1000000000 blocks needs 122070.31 GiB.*are free"):
        BACKEND.allocate_kv(10**9, 16, [(2, 512)], KVFormat("float32"))


@pytest.mark.parametrize(
    ("asked", "stored", "dtype", "reason"),
    [
        ("auto", "bfloat16", "float32", "slower on CPUs"),
        ("auto", "", "float32", "slower on CPUs"),
        ("bfloat16", "float32", "bfloat16", "asked for"),
        ("half", "float32", "float16", "asked for"),
        ("float", "bfloat16", "float32", "asked for"),
        ("float16", "bfloat16", "float16", "may overflow"),
    ],
)
def test_dtype(asked: str, stored: str, dtype: str, reason: str) -> None:
    chosen, why = BACKEND.resolve_dtype(asked, stored)
    assert chosen == dtype
    assert reason in why


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int3' is unknown; use one of: auto, float32"):
        BACKEND.resolve_dtype("int3", "float32")


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu9", "'tpu9' is unknown"), ("mps", "'mps' isn't supported"), ("cuda", "no NVIDIA GPU")],
)
def test_a_device_that_is_not_there(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        TorchBackend(device=device)


def test_description_names_threads_and_denormals() -> None:
    description = BACKEND.describe()
    assert f"{torch.get_num_threads()} threads" in description
    assert "denormals flushed to zero" in description


def test_denormals_are_flushed_on_any_thread() -> None:
    tiny = torch.full((4,), 1e-30)
    results: list[torch.Tensor] = []
    multiply = BACKEND.compile(lambda: tiny * 1e-10)
    thread = threading.Thread(target=lambda: results.append(multiply()))
    thread.start()
    thread.join()
    assert not results[0].any()


def test_compiled_functions_record_no_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert BACKEND.compile(lambda: weight * 2)().is_inference()


def test_attention_of_the_same_batch_is_planned_once() -> None:
    """Layers share the plan; layers with another window have their own."""
    cache = BACKEND.allocate_kv(4, 16, [(1, 8)], KVFormat("float32"))
    ctx = BACKEND.batch_context(host_batch([([0] * 20, [2, 1], 19, 1)], 16), cache)
    queries = torch.zeros(1, 2, 8)
    for window in (None, None, 4):
        ops.paged_attention(queries, cache[0], ctx, softmax_scale=1.0, window=window)
    assert len(ctx.plans) == 2


def test_logits_in_half_precision_are_sampled_in_float32() -> None:
    logits = torch.linspace(-1, 1, 3000).repeat(2, 1)
    logits = logits.bfloat16()  # many equal values: in bfloat16 their sum would stop growing
    settings = [np.full(2, v, np.float32) for v in (1.0, 1.0, 0.0)]
    uniform = np.array([0.0, 0.9999])
    top_k = np.zeros(2, np.int64)
    half = ops.sample(logits, settings[0], top_k, *settings[1:], uniform)
    full = ops.sample(logits.float(), settings[0], top_k, *settings[1:], uniform)
    assert half.tolist() == full.tolist()
    assert half[0] == logits[0].argmax()
    assert half[1] < 30
