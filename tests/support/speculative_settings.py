"""--speculative-config of each method for the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
    "draft_model": {"method": "draft_model", "model": "default", "num_speculative_tokens": 3},
    "layer_skip": {"method": "layer_skip", "num_layers": 8, "num_speculative_tokens": 3},
}


def settings_of(method: str, folder: Path) -> dict[str, Any]:
    """folder: for a head that is made for the purpose."""
    return dict(SETTINGS[method])
