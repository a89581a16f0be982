"""What the runner asks of whatever guesses tokens. The answers live in `octavo.speculative`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from octavo.core.step import ScheduledSequence, ScheduledStep
from octavo.ops import Array
from octavo.ops.batch import HostBatch, KVLayer
from octavo.runner.slots import Slots
from octavo.sampling.sampler import SampledRows


class Draft(NamedTuple):
    """K guessed tokens that may follow a sequence's last known one; K is at least 1.

    token_ids (K,) int64, parents before children. parents (K,) int64: index of the token that each
    one follows, -1 for the last known one; None is a chain, 0 to K - 1 in a row. Siblings differ.
    probabilities (K, V) float32: the distributions that the tokens were drawn from, V the
    tokenizer's vocabulary; None: they weren't drawn but chosen. Only a chain may be drawn.
    """

    token_ids: np.ndarray
    parents: np.ndarray | None = None
    probabilities: np.ndarray | None = None

    def paths(self) -> list[tuple[int, ...]]:
        """For the last known token and then each guess: the guesses up to it and with it."""
        tokens = self.token_ids.tolist()
        if self.parents is None:
            return [tuple(tokens[:end]) for end in range(len(tokens) + 1)]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, self.parents.tolist(), strict=True):
            paths.append((*paths[parent + 1], token))
        return paths


class Verified(NamedTuple):
    """What a draft came to: tokens or an error.

    token_ids: new tokens of the sequence: accepted guesses, and one more. accepted: indices of the
    guesses in the draft, along the path. rows: each token's row among the sampled ones.
    error: sampling failed right after the last known token. is_refusal: because of what the request
    asked for.
    """

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    rows: tuple[int, ...]
    error: str | None = None
    is_refusal: bool = False


class MethodSeconds(NamedTuple):
    """What each method took; see StepOutput."""

    drafting: tuple[float, ...]
    catching_up: tuple[float, ...]


class ComputedStep(NamedTuple):
    """A step of S sequences and T tokens after its forward and verification.

    hidden (T, D): the states that logits were made of. taps (T, D) each: the outputs of the layers
    that `Speculation.taps` names. Both are valid until the next forward. accepted: by index of a
    sequence that had a draft, which guesses of it. All arrays of the slots are those after the
    step.
    """

    step: ScheduledStep
    host: HostBatch
    hidden: Array
    taps: tuple[Array, ...]
    accepted: Mapping[int, Sequence[int]]

    def kept(self) -> list[np.ndarray]:
        """By sequence, the rows of T whose tokens belong to it, in its order: those asked for, then
        the drafts that were accepted. The token after the last of a sampling sequence's rows is its
        last known one.
        """
        starts = self.host.query_starts.tolist()
        kept = []
        for index, (start, end) in enumerate(pairwise(starts)):
            accepted = self.accepted.get(index)
            if accepted is None:
                kept.append(np.arange(start, end))
            else:
                # A drafted sequence has one token of its own in the step.
                kept.append(np.array([start, *(start + 1 + i for i in accepted)]))
        return kept


class Speculation(Protocol):
    """All configured ways of guessing. Belongs to one runner.

    kv_heads: (G, E) of the layers that it keeps in the KV cache besides the model's; their blocks
    are the model's blocks. taps: layers (0 is the first) whose outputs it wants to see.
    num_methods: a DraftRequest's method is below it.
    """

    kv_heads: Sequence[tuple[int, int]]
    taps: tuple[int, ...]
    num_methods: int

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        """Before the first step. kv_layers: those of the model, then those of `kv_heads`."""
        ...

    def begin(self, step: ScheduledStep) -> None:
        """The slots are as the step wants them: bindings, blocks and copies are applied."""
        ...

    def propose(self, sequences: Sequence[ScheduledSequence]) -> dict[int, Draft]:
        """Guess for the sequences that have a DraftRequest, after `begin`.

        By index in `sequences`, at most as long as asked; one without a guess decodes as ever.
        """
        ...

    def verify(self, draft: Draft, sampled: SampledRows, first_row: int) -> Verified:
        """What becomes of a draft of K guesses whose rows are first_row (the last known token's)
        and first_row + 1 + i (guess i's).
        """
        ...

    def observe(self, step: ComputedStep) -> None:
        """A step was computed."""
        ...

    def take_seconds(self) -> MethodSeconds:
        """What was taken since the last call."""
        ...
