"""What a head learns from: answers with their features, cut into batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from octavo.ops.torch.dtypes import to_tensor
from octavo.speculative.training.responses import Response
from octavo.speculative.training.target import FEATURE_DTYPE, Target

# So many batches' sequences are sorted by length together: little padding, and still mixed.
_POOL_BATCHES = 32


class Batch(NamedTuple):
    """B answered prompts, padded to L tokens.

    features (B, L, D) bfloat16. tokens (B, L) int64. lengths (B,), starts (B,) int64: how many
    tokens there are, and how many of these are the prompt's.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor

    def learnable(self) -> torch.Tensor:
        """(B, L - 1) bool: positions i of which a head can be asked for t_{i+2}: the chain that
        begins there comes after the answer's first token, and t_{i+2} is in the answer.
        """
        places = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device)
        first, last = self.starts[:, None] - 1, self.lengths[:, None] - 3
        return (places >= first) & (places <= last)


class Examples:
    """Responses and the features of all their tokens."""

    def __init__(self, responses: Sequence[Response], features: Path, hidden_size: int) -> None:
        self.responses = responses
        self.lengths = [len(r.prompt) + len(r.answer) for r in responses]
        self._starts = np.cumsum([0, *self.lengths])
        shape = (int(self._starts[-1]), hidden_size)
        self._features = np.memmap(features, FEATURE_DTYPE, "r", shape=shape)

    def batch(self, indices: Sequence[int], device: torch.device) -> Batch:
        lengths = [self.lengths[index] for index in indices]
        features = np.zeros((len(indices), max(lengths), self._features.shape[1]), FEATURE_DTYPE)
        tokens = np.zeros(features.shape[:2], np.int64)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            response, start = self.responses[index], self._starts[index]
            features[row, :length] = self._features[start : start + length]
            tokens[row, :length] = response.prompt + response.answer
        prompts = [len(self.responses[index].prompt) for index in indices]
        return Batch(
            to_tensor(features).to(device),
            torch.from_numpy(tokens).to(device),
            torch.tensor(lengths, device=device),
            torch.tensor(prompts, device=device),
        )

    def batches(self, indices: Sequence[int], num_tokens: int) -> list[list[int]]:
        """`indices` in batches of about `num_tokens` tokens, padding included, and the longest
        sequences first.
        """
        batches: list[list[int]] = []
        for index in sorted(indices, key=lambda index: -self.lengths[index]):
            room = num_tokens // self.lengths[batches[-1][0]] if batches else 0
            if batches and len(batches[-1]) < room:
                batches[-1].append(index)
            else:
                batches.append([index])
        return batches

    def epoch(self, indices: Sequence[int], num_tokens: int, seed: str) -> list[list[int]]:
        """`indices` in batches in random order, sequences of like length together."""
        rng = random.Random(seed)
        mixed = rng.sample(indices, len(indices))
        mean = sum(self.lengths[index] for index in indices) / len(indices)
        pool = max(1, round(_POOL_BATCHES * num_tokens / mean))
        batches = [
            batch
            for start in range(0, len(mixed), pool)
            for batch in self.batches(mixed[start : start + pool], num_tokens)
        ]
        rng.shuffle(batches)
        return batches


@dataclass(frozen=True)
class Vocabulary:
    """What a head reads and writes.

    embeddings (V, D): of all tokens. token_ids (W,) int64, rising: those that it may draft. head
    (W, D): the target's head of these. coverage: share of the answers' tokens that are among them.
    """

    embeddings: torch.Tensor
    token_ids: torch.Tensor
    head: torch.Tensor
    coverage: float

    @classmethod
    def of(
        cls,
        target: Target,
        responses: Sequence[Response],
        size: int,
        device: torch.device,
        *,
        vocab_size: int,
    ) -> Vocabulary:
        """The `size` tokens that the answers have most often, which are all if there are no more;
        where answers have fewer than that, the first ids fill up. vocab_size: of the tokenizer,
        since what the target's rows have beyond is padding.
        """
        counts = Counter(token for response in responses for token in response.answer)
        num_tokens = min(vocab_size, target.spec.vocab_size)
        ranked = sorted(range(num_tokens), key=lambda token: (-counts[token], token))
        chosen = sorted(ranked[:size])
        return cls(
            embeddings=torch.from_numpy(target.embeddings()).to(device),
            token_ids=torch.tensor(chosen, device=device),
            head=torch.from_numpy(target.head()[chosen]).to(device),
            coverage=sum(counts[token] for token in chosen) / max(1, counts.total()),
        )
