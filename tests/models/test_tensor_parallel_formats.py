"""Quantized checkpoints divided over ranks: in the bits that they are stored in, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.layers.layer import Piece
from octavo.layers.share import Share
from octavo.models.cut_groups import column_unit
from octavo.models.registry import build_model
from octavo.models.stored_piece import StoredPiece
from octavo.weights import open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.gguf_files import write_gguf
from support.quantized_files import CASES, quantize_checkpoint
from support.tensor_ranks import Ranks

TOKENS = np.random.default_rng(3).integers(VOCAB_SIZE, size=40).tolist()
HEADS_OF_A_GROUP: dict[str, dict[str, Any]] = {
    # Two heads have whole groups, and so have inner columns of experts.
    "llama": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 64},
}
FORMATS = [
    "gptq, 4 bits",
    "gptq v2, asymmetric (QNT-03)",
    "gptq, one group (QNT-01)",
    "gptq, groups of 8",
    "awq",
    "compressed-tensors W4A16, asymmetric",
    "compressed-tensors W8A8",
    "compressed-tensors FP8 by channel",
    "compressed-tensors NVFP4",
    "fp8 by blocks",
    "bitsandbytes NF4",
]
# Wide enough for two ranks to have whole blocks of K-quants.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
TYPES = ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def check(path: Path, backend: str) -> None:
    """Two ranks have the formats and, up to rounding, the logits of one process."""
    on = cpu_backend(backend)
    dtype = "stored" if backend == "native" else "float32"
    expected = Forward(load_model(path, on, dtype=dtype), on).prompt(TOKENS)
    ranks = Ranks(path, backend, 2, dtype=dtype)
    actual = ranks.prompt(TOKENS)
    if dtype == "float32":
        np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=2e-4)
        return
    # Activations in 8 bits: float32 rounding moves a few over the middle between two of them.
    error = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(error) < 0.01
    assert np.max(error) < 0.1


def formats(path: Path, share: Share | None = None) -> dict[str, str]:
    """How the native backend holds each weight."""
    checkpoint = open_checkpoint(str(path))
    model = build_model(checkpoint.config)
    if share is not None:
        model.shard(share)
    plan = model.plan_weights(checkpoint, cpu_backend("native"), "stored")
    names = [group[0].names[0] for group in model.tensors()]
    return dict(zip(names, plan.formats, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", HEADS_OF_A_GROUP)
@pytest.mark.parametrize("case", FORMATS)
def test_groups_of_checkpoints_are_shared_out(
    tmp_path: Path, case: str, family: str, backend: str
) -> None:
    original = make_checkpoint(family, tmp_path / "original", **HEADS_OF_A_GROUP[family])
    path, _ = quantize_checkpoint(CASES[case], original, tmp_path)
    check(path, backend)
    assert formats(path, Share(0, 2)) == formats(path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_of_gguf_are_shared_out(tmp_path: Path, type_name: str, backend: str) -> None:
    original = make_checkpoint("llama", tmp_path / "original", **WIDE)
    path = write_gguf(original, tmp_path / "model.gguf", matrix_type=type_name)
    check(path, backend)
    unit = column_unit(open_checkpoint(str(path)))
    assert unit == (256 if type_name.endswith("K") else 32)
    assert formats(path, Share(0, 2, inner_unit=unit)) == formats(path)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", "MXFP4"])
def test_experts_of_gguf_are_shared_out(tmp_path: Path, type_name: str) -> None:
    original = make_checkpoint(
        "qwen3_moe", tmp_path / "original", **WIDE, moe_intermediate_size=512, num_experts=4
    )
    path = write_gguf(original, tmp_path / "model.gguf", matrix_type=type_name)
    check(path, "native")
    unit = column_unit(open_checkpoint(str(path)))
    assert formats(path, Share(1, 2, inner_unit=unit)) == formats(path)


# --- what would cut a group --------------------------------------------------------------------


def refusal(path: Path, size: int = 2) -> str:
    checkpoint = open_checkpoint(str(path))
    model = build_model(checkpoint.config)
    model.shard(Share(0, size, inner_unit=column_unit(checkpoint)))
    with pytest.raises(ConfigError) as caught:
        model.plan_weights(checkpoint, cpu_backend("native"), "stored")
    model.plan_weights(checkpoint, cpu_backend("native"), "float32")  # has no groups
    return str(caught.value)


def test_heads_that_cut_a_group_are_refused(tmp_path: Path) -> None:
    original = make_checkpoint("qwen3", tmp_path / "original", head_dim=24)
    message = refusal(quantize_checkpoint(CASES["awq"], original, tmp_path)[0])
    assert message.startswith(
        "--tensor-parallel-size 2: model.layers.0.self_attn.o_proj.weight has 96 columns in groups "
        "of 32, of which columns 0 to 47, one rank's, are not whole ones"
    )


def test_scattered_groups_are_refused(tmp_path: Path) -> None:
    original = make_checkpoint("llama", tmp_path / "original")
    message = refusal(quantize_checkpoint(CASES["gptq, desc_act"], original, tmp_path)[0])
    assert "has 64 columns in groups that lie scattered over its rows (desc_act)" in message


def test_heads_that_cut_a_block_are_refused(tmp_path: Path) -> None:
    original = make_checkpoint("llama", tmp_path / "original", **WIDE | {"head_dim": 64})
    path = write_gguf(original, tmp_path / "model.gguf", matrix_type="Q4_K")
    assert "has 256 columns in groups of 256, of which columns 0 to 127" in refusal(path)


def test_inner_columns_that_are_one_block_are_refused(tmp_path: Path) -> None:
    original = make_checkpoint("llama", tmp_path / "original", **WIDE | {"intermediate_size": 256})
    path = write_gguf(original, tmp_path / "model.gguf", matrix_type="Q4_K")
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(ConfigError, match=r"256 inner columns, in groups of 256, .* works is 1$"):
        build_model(checkpoint.config).shard(Share(0, 2, inner_unit=column_unit(checkpoint)))


# --- reading -----------------------------------------------------------------------------------


def test_columns_are_read_without_a_copy_of_the_matrix(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint("llama", tmp_path)))
    name = "model.layers.0.mlp.down_proj.weight"
    part = StoredPiece(checkpoint, Piece(name, (64, 96), columns=range(32, 96)))
    values = part.read(slice(10, 20))
    assert values.shape == (10, 64)
    assert np.shares_memory(values, checkpoint.read(name))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_columns_of_blocks_are_the_blocks(tmp_path: Path, type_name: str) -> None:
    original = make_checkpoint("llama", tmp_path / "original", **WIDE)
    checkpoint = open_checkpoint(
        str(write_gguf(original, tmp_path / "model.gguf", matrix_type=type_name))
    )
    name = "model.layers.0.mlp.down_proj.weight"
    piece = Piece(name, (256, 512), rows=range(8, 250, 2))
    first, last = (
        StoredPiece(checkpoint, piece._replace(columns=columns))
        for columns in (range(256), range(256, 512))
    )
    whole = StoredPiece(checkpoint, piece)
    rows = slice(3, 40)
    assert first.dtype == last.dtype == type_name
    both = np.concatenate([first.read_stored(rows), last.read_stored(rows)], axis=1)
    np.testing.assert_array_equal(both, whole.read_stored(rows))
    across = StoredPiece(checkpoint, piece._replace(columns=range(16, 512)))
    assert across.dtype == "float32"
