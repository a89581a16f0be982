"""Medusa's heads in torch: one residual block for each token ahead.

Head k takes the feature f_n (the target's hidden state after its final norm) and gives one of which
the target's own head makes the logits of t_{n+2+k}. Names and shapes of the parameters are those of
Medusa's published checkpoints, whose head of logits is left out. Source: arXiv 2401.10774, section
2.1.1.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from octavo.speculative.training.eagle import later


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """num_heads heads of one block each, for features (B, L, D)."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__(nn.ModuleList([_Block(hidden)]) for _ in range(num_heads))

    def initialize(self, generator: torch.Generator) -> None:
        """Each head begins as the target's own, which is arXiv 2401.10774's way."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def fit(self, features: torch.Tensor, embeddings: torch.Tensor, truth: torch.Tensor) -> None:
        """They have begun already."""

    def published(self) -> dict[str, torch.Tensor]:
        """The weights under their published names."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def forward(
        self, features: torch.Tensor, embeddings: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """As EagleHead's: step j at position i is of the chain that begins at i - j, where head j
        looks at its feature.
        """
        blocks = [cast(nn.ModuleList, head)[0] for head in self]
        return [later(block(features), step) for step, block in enumerate(blocks[:num_steps])]
