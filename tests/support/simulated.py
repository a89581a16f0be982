"""Cost models for tests of the simulator."""

from __future__ import annotations

import random
from dataclasses import dataclass

from octavo.simulator.cost_model import CostModel, Provenance
from octavo.simulator.work import StepWork


@dataclass
class LinearCosts:
    """A CostModel: a step takes so long, and each of its tokens so much longer."""

    step_seconds: float = 0.01
    token_seconds: float = 0.001
    guess_seconds: float = 0.0
    num_stages: int = 1
    windows: tuple[int | None, ...] = (None,)
    provenance: Provenance = "prior"

    def seconds(self, work: StepWork) -> float:
        return self.step_seconds + self.token_seconds * work.num_tokens

    def draft_seconds(self, work: StepWork) -> float:
        return self.guess_seconds * work.longest_draft

    def draw(self, rng: random.Random) -> CostModel:
        return self


@dataclass
class RandomCosts(LinearCosts):
    """Steps take what chance says."""

    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def seconds(self, work: StepWork) -> float:
        return self._random.uniform(0.001, 0.1)
