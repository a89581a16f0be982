"""transformers as the oracle of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def load_oracle(folder: Path) -> Any:
    """The same checkpoint in transformers, float32, attention spelled out: but for Falcon, which
    then adds linear biases twice (transformers 5).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    is_falcon = AutoConfig.from_pretrained(folder).model_type == "falcon"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa" if is_falcon else "eager"
    )
    return model.eval()


def oracle_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Logits at every position, (T, V)."""
    import torch

    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return logits
