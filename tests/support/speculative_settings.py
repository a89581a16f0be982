"""--speculative-config of each method for the default model."""

from __future__ import annotations

import json
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
}


def settings_of(method: str, folder: Path) -> dict[str, Any]:
    """folder: for a head that is made for the purpose."""
    settings = dict(SETTINGS[method])
    if method == "medusa":
        settings["model"] = str(_medusa_head(folder))
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
