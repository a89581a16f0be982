"""What a step costs in seconds: what all answers to that have in common."""

from __future__ import annotations

import random
from typing import Literal, Protocol

from octavo.simulator.work import StepWork

Provenance = Literal["specification", "measured", "fitted", "prior"]
"""Where a number is from: a data sheet, a measurement of this machine, a regression on recorded
steps, or what is usual.
"""


class CostModel(Protocol):
    """provenance: of its seconds; see `Provenance`. windows: for `work_of`. num_stages: of a
    pipeline; so many steps are computed at once, each in one stage for seconds / num_stages.
    """

    @property
    def provenance(self) -> Provenance: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    @property
    def num_stages(self) -> int: ...

    def seconds(self, work: StepWork) -> float:
        """From handing a step to the executor until its tokens are there, guessing apart. More work
        never costs less.
        """
        ...

    def draft_seconds(self, work: StepWork) -> float:
        """Of guessing for the step; 0 where nothing is guessed."""
        ...

    def draw(self, rng: random.Random) -> CostModel:
        """One of those that may be true, as likely as it is: predictions by many of them spread as
        the truth does. Its seconds scatter from step to step too, where that is known.
        """
        ...
