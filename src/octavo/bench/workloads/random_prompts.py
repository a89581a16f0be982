"""Prompts of token ids, for an engine in this process."""

from __future__ import annotations

import math
import random

from octavo.core.errors import ConfigError


class RandomPrompts:
    """Prompts of independent random tokens. No two of them share a block, so that a prefix cache
    has nothing to reuse and each prompt costs what it says.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._tokens = range(vocab_size)
        self._random = random.Random(seed)

    def take(self, length: int) -> list[int]:
        """The next prompt, of `length` tokens."""
        return self._random.choices(self._tokens, k=length)

    def length_near(self, length: int, range_ratio: float) -> int:
        """Uniform in [length (1 - r), length (1 + r)], at least 1: vLLM's --random-range-ratio."""
        low = max(1, math.ceil(length * (1 - range_ratio)))
        return self._random.randint(low, max(low, math.floor(length * (1 + range_ratio))))


def check_fits(input_len: int, output_len: int, max_model_len: int) -> None:
    """Raises ConfigError if a prompt and its output are longer than the model's context."""
    if input_len + output_len > max_model_len:
        raise ConfigError(
            f"{input_len} input tokens and {output_len} output tokens are more than the "
            f"{max_model_len} tokens of the context; lower --input-len or --output-len, or raise "
            "--max-model-len"
        )
