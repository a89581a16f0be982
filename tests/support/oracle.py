"""transformers as the oracle of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def load_oracle(folder: Path) -> Any:
    """The same checkpoint in transformers, float32, attention spelled out."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def oracle_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Logits at every position, (T, V)."""
    import torch

    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return logits
