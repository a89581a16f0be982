"""Log-probabilities as records."""

from __future__ import annotations

import numpy as np

from octavo.core.step import TokenLogprobs
from octavo.ops import Array, log_probabilities

ALL_TOKENS = -1


def token_logprobs(logits: Array, tokens: np.ndarray, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens[r] and of the `num_top` likeliest tokens under logits[r].

    num_top: ALL_TOKENS or more than exist gives the whole vocabulary. Shapes: logits (R, V), V the
    tokenizer's vocabulary, tokens (R,) int64 -> R records.
    """
    vocab_size = logits.shape[1]
    num_top = vocab_size if num_top == ALL_TOKENS else min(num_top, vocab_size)
    chosen, ranks, top_ids, top = log_probabilities(logits, tokens, num_top)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(row_ids, row_top, strict=True)))
        for token, logprob, rank, row_ids, row_top in zip(
            tokens.tolist(),
            chosen.tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            top.tolist(),
            strict=True,
        )
    ]
