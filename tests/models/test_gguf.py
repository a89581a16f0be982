"""GGUF files give the logits of their weights: those of transformers, and on the native backend in
the bits they are stored in (QNT-05, QNT-07).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo import ops
from octavo.models.loader import plan_weights
from octavo.weights import open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.gguf_files import GGUF_FAMILIES, write_gguf
from support.oracle import load_oracle, oracle_logits

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOKENS = np.random.default_rng(2).integers(VOCAB_SIZE, size=100).tolist()


def logits(source: Path, backend: str, dtype: str = "float32") -> np.ndarray:
    model = load_model(source, cpu_backend(backend), dtype=dtype)
    return Forward(model, cpu_backend(backend)).prompt(TOKENS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_qnt_05_rope_freqs_are_applied(tmp_path: Path, backend: str) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama3", rope_parameters=LLAMA3_ROPE)
    expected = oracle_logits(load_oracle(folder), TOKENS)
    for source in (write_gguf(folder, tmp_path / "llama3.gguf"), folder):
        np.testing.assert_allclose(logits(source, backend), expected, atol=3e-4, rtol=3e-4)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in GGUF_FAMILIES},
    # Files don't say what scores are scaled by.
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3_text": ("gemma3_text", {"query_pre_attn_scalar": 24}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2 without caps": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon 7B": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1},
    ),
    "falcon, one norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "phi3, long": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [1.5 + i / 4 for i in range(8)],
                "rope_theta": 10000.0,
            },
        },
    ),
    "stablelm 2": ("stablelm", {"use_qkv_bias": True}),
    "olmo without clipping": ("olmo", {"clip_qkv": None}),
    "command r+": ("cohere", {"use_qk_norm": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_checkpoint_that_was_converted(
    tmp_path: Path, variant: str
) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(family, tmp_path / "model", **overrides)
    expected = oracle_logits(load_oracle(folder), TOKENS)
    path = write_gguf(folder, tmp_path / "model.gguf")
    np.testing.assert_allclose(logits(path, "native"), expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize(
    ("stored", "held", "most"),
    [
        ("Q8_0", "int8", 0.05),
        ("Q4_0", "int4", 0.05),
        ("Q4_1", "int4 with minimum", 0.05),
        ("F16", "float16", 1e-5),
    ],
)
def test_blocks_are_computed_in_their_own_values(
    tmp_path: Path, family: str, stored: str, held: str, most: float
) -> None:
    """As stored, nothing is lost but the rounding of activations to 8 bits."""
    folder = make_checkpoint(family, tmp_path / family)
    path = write_gguf(folder, tmp_path / "model.gguf", matrix_type=stored)
    checkpoint, backend = open_checkpoint(str(path)), cpu_backend("native")
    model = load_model(checkpoint, backend, dtype="stored")
    assert set(plan_weights(model, checkpoint, backend, "stored").formats) == {"float32", held}

    table = checkpoint.read("model.embed_tokens.weight")
    rows = ops.embedding(model.embedding.table.array, backend.from_host(np.arange(VOCAB_SIZE)))
    np.testing.assert_array_equal(backend.to_host(rows), table)

    exact = logits(path, "torch")
    np.testing.assert_allclose(logits(path, "native"), exact, atol=3e-4, rtol=3e-4)
    error = np.linalg.norm(Forward(model, backend).prompt(TOKENS) - exact, axis=1)
    assert np.median(error / np.linalg.norm(exact, axis=1)) < most


@pytest.mark.parametrize("backend", BACKENDS)
def test_qnt_07_a_tied_quantized_embedding_is_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    # gguf can't write Q6_K: 210 random bytes a block of 256, with scales of a sensible size.
    blocks = np.random.default_rng(0).integers(0, 256, (VOCAB_SIZE, 210), np.uint8)
    blocks[:, 192:208] %= 20
    blocks[:, 208:210] = np.full((VOCAB_SIZE, 1), 0.004, np.float16).view(np.uint8)
    kind = gguf.GGMLQuantizationType.Q6_K
    folder = make_checkpoint("qwen2", tmp_path / "tied", hidden_size=256)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.tensor(gguf.quants.dequantize(blocks, kind))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantize = gguf.quants.quantize
    monkeypatch.setattr(
        gguf.quants, "quantize", lambda a, t: blocks if t == kind else quantize(a, t)
    )
    path = write_gguf(folder, tmp_path / "tied.gguf", embedding_type="Q6_K")
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    expected = oracle_logits(load_oracle(folder), TOKENS)
    actual = logits(path, backend)
    np.testing.assert_allclose(actual, expected, atol=1e-2, rtol=1e-3)  # of logits of about 70
