"""GGUF files give the logits that transformers gives for the same weights (QNT-05, QNT-07)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.gguf_files import write_gguf
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


def test_qnt_05_rope_freqs_are_applied(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama3", rope_parameters=LLAMA3_ROPE)
    expected = oracle_logits(load_oracle(folder), TOKENS)
    for source in (write_gguf(folder, tmp_path / "llama3.gguf"), folder):
        logits = Forward(load_model(source)).prompt(TOKENS)
        np.testing.assert_allclose(logits, expected, atol=3e-4, rtol=3e-4)


def test_qnt_07_a_tied_quantized_embedding_is_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    logits = Forward(load_model(path)).prompt(TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-2, rtol=1e-3)  # of logits of about 70
