"""--speculative-config of each method for the default model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 576
"""Of the default model."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
    "draft_model": {"method": "draft_model", "model": "default", "num_speculative_tokens": 3},
    "layer_skip": {"method": "layer_skip", "num_layers": 8, "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "num_speculative_tokens": 6},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
}


def settings_of(method: str, folder: Path) -> dict[str, Any]:
    """folder: for a head that is made for the purpose; EAGLE's comes with Octavo."""
    settings = dict(SETTINGS[method])
    if (write := _HEADS.get(method)) is not None:
        settings["model"] = str(write(folder))
    return settings


def _medusa_head(folder: Path) -> Path:
    """Heads that guess the same token again, and what else was likely: right where text repeats
    itself, and trees everywhere.
    """
    num_heads = 3
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": 49152,
    }
    tensors: dict[str, np.ndarray] = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = np.zeros((HIDDEN, HIDDEN), np.float32)
        tensors[f"{head}.0.linear.bias"] = np.zeros(HIDDEN, np.float32)
    return _save(folder, config, tensors)


def _eagle3_head(folder: Path) -> Path:
    """A head whose layer adds nothing, so that it guesses what was likely one token before."""
    inner, keys = 1024, 192
    width = 2 * HIDDEN
    shapes = {
        "self_attn.q_proj": (HIDDEN, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
    }
    tensors = {f"midlayer.{name}.weight": np.zeros(s, np.float32) for name, s in shapes.items()}
    norms = ("post_attention_layernorm", "input_layernorm", "hidden_norm")
    tensors |= {f"midlayer.{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    tensors["norm.weight"] = np.ones(HIDDEN, np.float32)
    others = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    tensors["fc.weight"] = np.concatenate([others, np.eye(HIDDEN, dtype=np.float32)], axis=1)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
    }
    return _save(folder, config, tensors)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


_HEADS: dict[str, Callable[[Path], Path]] = {
    "medusa": _medusa_head,
    "eagle3": _eagle3_head,
}
