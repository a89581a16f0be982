"""Checkpoints that keep the same model otherwise: without their head's prefix, or with projections
in an order that transformers has no module for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.oracle import load_oracle, oracle_logits

TOKENS = np.random.default_rng(3).integers(VOCAB_SIZE, size=40).tolist()


def logits(folder: Path, backend: str) -> np.ndarray:
    return Forward(load_model(folder, cpu_backend(backend)), cpu_backend(backend)).prompt(TOKENS)


def rewrite(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "prefix"),
    [("gpt2", "transformer."), ("bloom", "transformer."), ("opt", "model.")],
)
def test_models_saved_without_their_head(
    tmp_path: Path, family: str, prefix: str, backend: str
) -> None:
    folder = make_checkpoint(family, tmp_path)
    expected = oracle_logits(load_oracle(folder), TOKENS)
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix(prefix): array for name, array in tensors.items()}
    if family == "gpt2":
        short["h.0.attn.bias"] = np.tril(np.ones((8, 8), np.float32))  # a mask, of no use
    assert set(short) != set(tensors)
    rewrite(folder, short)
    np.testing.assert_allclose(logits(folder, backend), expected, atol=3e-4, rtol=3e-4)


def test_gpt_neox_with_the_head_that_others_have(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_neox", tmp_path)
    expected = logits(folder, "native")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    rewrite(folder, tensors)
    assert np.array_equal(logits(folder, "native"), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_internlm2_is_llama_under_other_names(tmp_path: Path, backend: str) -> None:
    """transformers has no module for it: its function is Llama's, so that is the oracle."""
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=2, attention_bias=True)
    expected = oracle_logits(load_oracle(folder), TOKENS)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kv_heads, size = config["num_key_value_heads"], config["head_dim"]
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        ".self_attn.o_proj": ".attention.wo",
        ".mlp.gate_proj": ".feed_forward.w1",
        ".mlp.up_proj": ".feed_forward.w3",
        ".mlp.down_proj": ".feed_forward.w2",
        ".input_layernorm": ".attention_norm",
        ".post_attention_layernorm": ".ffn_norm",
    }
    renamed = {}
    for name, array in tensors.items():
        if "q_proj" in name:  # each key head's queries, then its key and value
            parts = [
                tensors[name.replace("q_proj", part)].reshape(kv_heads, -1, size, *array.shape[1:])
                for part in ("q_proj", "k_proj", "v_proj")
            ]
            name = name.replace("self_attn.q_proj", "attention.wqkv")
            array = np.concatenate(parts, axis=1).reshape(-1, *array.shape[1:])
        elif "k_proj" in name or "v_proj" in name:
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = array
    rewrite(folder, renamed)
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(logits(folder, backend), expected, atol=3e-4, rtol=3e-4)
