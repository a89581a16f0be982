"""GGUF files in every type of blocks: on the native backend weights stay in their bits, and logits
are those of the floats that they stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import ops
from octavo.models.loader import plan_weights
from octavo.models.registry import build_model
from octavo.weights import open_checkpoint
from octavo.weights.gguf_header import SUPPORTED_TYPES
from support.backends import cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.gguf_files import write_gguf

TOKENS = np.random.default_rng(2).integers(VOCAB_SIZE, size=60).tolist()


class Held(NamedTuple):
    """How a type is held; error: of logits from activations in 8 bits, at most."""

    format: str
    error: float


TYPES = {
    "F32": Held("float32", 1e-5),
    "F16": Held("float16", 1e-5),
    "BF16": Held("bfloat16", 1e-5),
    "Q8_0": Held("int8", 0.05),
    "Q4_0": Held("int4", 0.05),
    "Q4_1": Held("int4 with minimum", 0.05),
    "Q5_0": Held("int8", 0.05),
    "Q5_1": Held("int8 with minimum, float32 scales", 0.05),
    "Q2_K": Held("int4 with minimum in groups of 16, int8 scales", 0.05),
    "Q3_K": Held("int4 in groups of 16, int8 scales", 0.05),
    "Q4_K": Held("int4 with minimum, int8 scales", 0.05),
    "Q5_K": Held("int8 with minimum, int8 scales", 0.05),
    "Q6_K": Held("int8 in groups of 16, int8 scales", 0.05),
    "MXFP4": Held("mxfp4", 0.05),
}
# Rows are whole blocks of K-quants.
WIDE = {"hidden_size": 256, "intermediate_size": 256}
FEW = {**WIDE, "num_local_experts": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**WIDE, "head_dim": 64}),
    "gemma3": ("gemma3_text", {**WIDE, "head_dim": 64}),
    "qwen3_moe": ("qwen3_moe", {**FEW, "head_dim": 64, "moe_intermediate_size": 256}),
}


def formats_by_name(path: Path) -> dict[str, str]:
    """How the native backend holds each weight, by the first of its tensors."""
    checkpoint, backend = open_checkpoint(str(path)), cpu_backend("native")
    model = build_model(checkpoint.config)
    plan = plan_weights(model, checkpoint, backend, "stored")
    names = [group[0].names[0] for group in model.tensors()]
    return dict(zip(names, plan.formats, strict=True))


def logits(path: Path, backend: str) -> np.ndarray:
    """Of the floats that blocks stand for."""
    return Forward(load_model(path, cpu_backend(backend)), cpu_backend(backend)).prompt(TOKENS)


def error(actual: np.ndarray, exact: np.ndarray) -> float:
    """Of the logits of a position as a share of them, the median."""
    off = np.linalg.norm(actual - exact, axis=1) / np.linalg.norm(exact, axis=1)
    return float(np.median(off))


def test_every_type_that_is_read_is_here() -> None:
    assert set(TYPES) == set(SUPPORTED_TYPES)


def make_wide(family: str, folder: Path, **overrides: Any) -> Path:
    """A checkpoint with smaller weights: those of `make_checkpoint` are for narrow models, and let
    every rounding grow in wide ones.
    """
    file = make_checkpoint(family, folder, **overrides) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and ".layers." in name:
            tensors[name] = tensor / 3
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_wide(family, tmp_path_factory.mktemp(family), **overrides)
        for name, (family, overrides) in MODELS.items()
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_are_computed_in_their_own_values(
    folders: dict[str, Path], tmp_path: Path, model: str, type_name: str
) -> None:
    path = write_gguf(folders[model], tmp_path / "model.gguf", matrix_type=type_name)
    held, most = TYPES[type_name]
    assert set(formats_by_name(path).values()) <= {"float32", held}

    backend = cpu_backend("native")
    stored = load_model(path, backend, dtype="stored")
    table = open_checkpoint(str(path)).read("model.embed_tokens.weight")
    rows = ops.embedding(stored.embedding.table.array, backend.from_host(np.arange(VOCAB_SIZE)))
    np.testing.assert_array_equal(backend.to_host(rows), table.astype(np.float32))

    exact = logits(path, "torch")
    np.testing.assert_allclose(logits(path, "native"), exact, atol=3e-4, rtol=3e-4)
    assert error(Forward(stored, backend).prompt(TOKENS), exact) < most


@pytest.mark.parametrize(
    ("matrices", "experts", "embedding"),
    [("Q8_0", "Q4_K", "Q6_K"), ("F16", "MXFP4", "BF16"), ("BF16", "Q3_K", "F32")],
)
def test_types_are_mixed_in_one_file(
    folders: dict[str, Path], tmp_path: Path, matrices: str, experts: str, embedding: str
) -> None:
    path = write_gguf(
        folders["qwen3_moe"],
        tmp_path / "model.gguf",
        matrix_type=matrices,
        expert_type=experts,
        embedding_type=embedding,
    )
    asked = {TYPES[one].format for one in (matrices, experts, embedding)}
    assert set(formats_by_name(path).values()) == {"float32", *asked}
    actual = Forward(load_model(path, cpu_backend("native"), dtype="stored"), cpu_backend("native"))
    assert error(actual.prompt(TOKENS), logits(path, "torch")) < 0.05


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": FEW,
    "deepseek_v3": {
        "n_routed_experts": 8,
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "kv_lora_rank": 256,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 256,
        "v_head_dim": 64,
        "intermediate_size": 256,
    },
    "gpt_oss": {**FEW, "head_dim": 64},
    "llama4_text": {**WIDE, "intermediate_size_mlp": 256, "head_dim": 64},
    "granitemoe": FEW,
}


@pytest.mark.parametrize("type_name", ["Q4_K", "MXFP4"])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_and_latent_attention_stay_in_their_bits(
    tmp_path: Path, family: str, type_name: str
) -> None:
    folder = make_wide(family, tmp_path / "model", **EXPERTS[family])
    path = write_gguf(folder, tmp_path / "model.gguf", matrix_type=type_name)
    model = load_model(path, cpu_backend("native"), dtype="stored")
    held = formats_by_name(path)
    low = {name for name, format in held.items() if format == TYPES[type_name].format}
    of_experts = {name for name in held if ".experts." in name and name.endswith("weight")}
    by_head = {name for name in held if "k_b_proj" in name or "v_b_proj" in name}
    assert of_experts | by_head <= low
    assert of_experts
    assert bool(by_head) == (family == "deepseek_v3")
    actual = Forward(model, cpu_backend("native")).prompt(TOKENS)
    exact = logits(path, "torch")
    np.testing.assert_allclose(logits(path, "native"), exact, atol=3e-4, rtol=3e-4)
    assert error(actual, exact) < 0.1
