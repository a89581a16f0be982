"""What a way of guessing tokens is. One file of this package a way; `registry.py` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.core.step import DraftRequest, ScheduledStep
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a proposer needs and gives; nothing else tells proposers apart.

    needs_hidden_states: it must `observe` every step whose tokens it shall know.
    gives_probabilities: it can draw its guesses, for requests that sample without a seed.
    makes_trees: its drafts may branch. knows_confidence: it honours DraftRequest.min_probability.
    embeds_tokens: it looks them up in the target's embedding.
    """

    needs_hidden_states: bool = False
    gives_probabilities: bool = False
    makes_trees: bool = False
    knows_confidence: bool = False
    embeds_tokens: bool = False


class DraftTask(NamedTuple):
    """Guess what follows the last known token of the sequence in `slot`."""

    slot: int
    request: DraftRequest


class Proposer(Protocol):
    """One way of guessing. Belongs to one runner.

    kv_heads, taps: as of `Speculation`; empty for most.
    """

    name: str
    capabilities: Capabilities
    kv_heads: Sequence[tuple[int, int]]
    taps: tuple[int, ...]

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        """Before the first step. slots: whose tokens and blocks it may read at any time after, and
        never changes. kv_layers: those of the model, then its own.
        """
        ...

    def begin(self, step: ScheduledStep) -> None:
        """The slots are as the step wants them."""
        ...

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        """Read what was missed of the tasks' sequences, as far as one step allows; `propose` is
        next, with the same tasks. This time is told apart, since a sequence needs it once.
        """
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """A draft for each task, or None where it has no guess. Its slots differ."""
        ...

    def observe(self, step: ComputedStep) -> None:
        """A step was computed; called after every step. step.taps: of its own `taps`, in order."""
        ...
