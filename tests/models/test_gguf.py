"""GGUF files give the logits of the checkpoints that they were made from (QNT-05, QNT-07)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.gguf_files import GGUF_FAMILIES, quantized, write_gguf
from support.oracle import load_oracle, oracle_logits

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
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
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": []}),  # llama.cpp's are mixtures in all layers
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": GPT_OSS_ROPE}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 24},
    ),
    "deepseek_v3, no weights' sum": (
        "deepseek_v3",
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
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


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "deepseek_v3"])
def test_files_of_the_first_converters(tmp_path: Path, family: str) -> None:
    """Of Mixtral, each expert's matrices were tensors; latent attention's were as transformers has
    them.
    """
    folder = make_checkpoint(family, tmp_path / "model")
    expected = oracle_logits(load_oracle(folder), TOKENS)
    path = write_gguf(folder, tmp_path / "model.gguf", is_old=True)
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert {"blk.1.ffn_gate.0.weight", "blk.1.attn_kv_b.weight"} & names
    np.testing.assert_allclose(logits(path, "native"), expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_qnt_07_a_tied_quantized_embedding_is_the_head(tmp_path: Path, backend: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint("qwen2", tmp_path / "tied", hidden_size=256)
    path = write_gguf(folder, tmp_path / "tied.gguf", embedding_type="Q6_K")
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    tensors = load_file(folder / "model.safetensors")
    blocks = quantized(tensors["model.embed_tokens.weight"].numpy(), "Q6_K")
    rounded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q6_K)
    tensors["model.embed_tokens.weight"] = torch.tensor(rounded)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = oracle_logits(load_oracle(folder), TOKENS)
    actual = logits(path, backend)
    np.testing.assert_allclose(actual, expected, atol=1e-2, rtol=1e-3)  # of logits of about 70
