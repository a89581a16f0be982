"""What a head is told of its mistakes, and how good it is in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F  # noqa: N812  (its usual name)

from octavo.speculative.training.examples import Batch, Vocabulary

# A later token is drafted only if those before it were accepted, and so less often.
_STEP_WEIGHT = 0.8


class Drafter(Protocol):
    """EagleHead or MedusaHeads."""

    def __call__(
        self, features: torch.Tensor, embeddings: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class Loss:
    """total: to be made small; a mean of the steps'. agreement: share of the first drafted tokens
    that are the target's likeliest ones of the vocabulary.
    """

    total: torch.Tensor
    agreement: float


def loss(
    head: Drafter,
    batch: Batch,
    vocabulary: Vocabulary,
    *,
    num_steps: int,
    feature_weight: float,
    feature_scale: float,
) -> Loss:
    """Cross-entropy against the target's distributions over the vocabulary, and smooth L1 distance
    to its features, at every step. Source: arXiv 2401.15077, section 4.2.

    The target's logits are made here from its features, not kept: they'd be ten times the size.
    feature_scale: the features' root mean square, by which the distance is divided.
    """
    asked = batch.learnable()
    features = batch.features.float()
    outputs = head(features[:, :-1], vocabulary.embeddings[batch.tokens[:, 1:]], num_steps)
    truth = features[:, 1:][asked]
    with torch.no_grad():
        wanted = torch.softmax((truth @ vocabulary.head.T).float(), dim=-1)
    # Positions of a step whose chain would begin in the prompt count for nothing.
    depth = (torch.arange(asked.shape[1], device=asked.device) - batch.starts[:, None] + 1)[asked]
    total = torch.zeros((), device=features.device)
    agreement = 0.0
    for step, output in enumerate(outputs):
        guessed = output[asked]
        logits = (guessed @ vocabulary.head.T).float()
        entropy = -(wanted * torch.log_softmax(logits, dim=-1)).sum(dim=-1)
        distance = F.smooth_l1_loss(
            guessed.float() / feature_scale, truth / feature_scale, reduction="none"
        ).mean(dim=-1)
        counts = depth >= step
        each = entropy + feature_weight * distance
        total = total + _STEP_WEIGHT**step * (each * counts).sum() / counts.sum().clamp(min=1)
        if step == 0:
            agreement = (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    return Loss(total / sum(_STEP_WEIGHT**step for step in range(num_steps)), agreement)


@dataclass
class Acceptance:
    """Of greedy chains that begin after every token of held-out answers: how many came to be
    verified at each position, and how many of these were the target's own token.
    """

    drafted: list[int]
    accepted: list[int]

    @property
    def rates(self) -> list[float]:
        """Share accepted at each position, of those whose predecessors all were."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def expected_length(self) -> float:
        """Accepted tokens of a chain as long as there are positions."""
        length, probability = 0.0, 1.0
        for rate in self.rates:
            probability *= rate
            length += probability
        return length


def count_accepted(
    head: Drafter, batch: Batch, vocabulary: Vocabulary, acceptance: Acceptance
) -> None:
    """Add a batch of greedy answers to `acceptance`. Every token of a chain is drafted from the
    answer's own, as is right when those before it were accepted.
    """
    asked = batch.learnable()
    with torch.inference_mode():
        features = batch.features.float()
        embeddings = vocabulary.embeddings[batch.tokens[:, 1:]]
        outputs = head(features[:, :-1], embeddings, len(acceptance.drafted))
        truth = F.pad(batch.tokens[:, 2:], (0, 1))
        is_alive = asked
        for step, output in enumerate(outputs):
            if step:
                # The chain that drafted position i - 1 goes on at i.
                is_alive = F.pad(is_alive[:, :-1], (1, 0)) & asked
            drafted = vocabulary.token_ids[(output[is_alive] @ vocabulary.head.T).argmax(-1)]
            is_right = drafted == truth[is_alive]
            acceptance.drafted[step] += len(drafted)
            acceptance.accepted[step] += int(is_right.sum())
            is_alive = is_alive.masked_scatter(is_alive, is_right)
