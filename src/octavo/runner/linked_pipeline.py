"""Stages that are joined by links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledStep, StageTime
from octavo.parallel.links import Kind, Link
from octavo.runner.speculation import Draft

_MOST_STAGES = 1 << 12
_HEAD = 3  # of a draft in a message: sequence, number of guesses, whether it is a tree


class LinkedPipeline:
    """A `octavo.runner.pipeline.Pipeline`: one stage's place in it, of one rank of the stage.

    previous: None on the first stage. next: None on the last. drafts: on the last stage, to each of
    the others; on these, the one to the last. It may be the link that joins two neighbours anyway,
    since drafts go the other way.
    """

    def __init__(
        self, previous: Link | None, next: Link | None, drafts: Sequence[Link] = ()
    ) -> None:
        self._previous = previous
        self._next = next
        self._drafts = drafts
        self._buffer = np.empty(0, np.uint8)
        self._drafted_step = -1  # that the others have drafts of, or know that there are none

    def send_drafts(self, step: ScheduledStep, drafts: Mapping[int, Draft]) -> None:
        if not _most_numbers(step):
            return
        numbers = _to_numbers(drafts)[np.newaxis]
        for link in self._drafts:
            link.send(Kind.DRAFTS, step.step_id, [numbers])
        self._drafted_step = step.step_id

    def receive_drafts(self, step: ScheduledStep) -> dict[int, Draft]:
        most = _most_numbers(step)
        if not most:
            return {}
        (link,) = self._drafts
        numbers = link.receive(Kind.DRAFTS, step.step_id, (1, 1, most))
        return _to_drafts(numbers.reshape(-1), step)

    def send(self, step_id: int, arrays: Sequence[np.ndarray]) -> None:
        if self._next is None:
            raise InvariantError("the last stage has none to send to")
        self._next.send(Kind.ACTIVATIONS, step_id, arrays)

    def receive(self, step_id: int, shape: tuple[int, int, int]) -> np.ndarray:
        if self._previous is None:
            raise InvariantError("the first stage has none to receive from")
        most = math.prod(shape) * max(BYTES_PER_VALUE.values())
        if len(self._buffer) < most:
            self._buffer = np.empty(most, np.uint8)
        arrays = self._previous.receive(Kind.ACTIVATIONS, step_id, shape, self._buffer)
        if arrays.shape != shape or arrays.dtype.name not in BYTES_PER_VALUE:
            raise InvariantError(
                f"step {step_id}: the stage before gave {arrays.dtype} arrays of {arrays.shape}, "
                f"not floats of {shape}"
            )
        return arrays

    def send_times(self, step_id: int, times: Sequence[StageTime]) -> None:
        if self._next is None:
            raise InvariantError("the last stage has none to send to")
        self._next.send(Kind.TIMES, step_id, [np.array(times, np.float64)])

    def receive_times(self, step_id: int) -> list[StageTime]:
        if self._previous is None:
            return []
        most = (1, _MOST_STAGES, len(StageTime._fields))
        (times,) = self._previous.receive(Kind.TIMES, step_id, most)
        return [StageTime(*time) for time in times.tolist()]

    def fail(self, step: ScheduledStep, reason: str) -> None:
        if self._next is not None:
            self._next.send_failure(step.step_id, reason)
        elif _most_numbers(step) and self._drafted_step != step.step_id:
            for link in self._drafts:
                link.send_failure(step.step_id, reason)


def _most_numbers(step: ScheduledStep) -> int:
    """Of the drafts that a step asks for; 0 if it asks for none."""
    asked = [sequence.draft.length for sequence in step.sequences if sequence.draft is not None]
    return _HEAD * len(asked) + 2 * sum(asked)


def _to_numbers(drafts: Mapping[int, Draft]) -> np.ndarray:
    """(n,) int64: of each draft _HEAD numbers, the guesses, and for a tree their parents."""
    parts: list[np.ndarray] = [np.empty(0, np.int64)]
    for index, draft in drafts.items():
        is_tree = draft.parents is not None
        parts += [np.array([index, len(draft.token_ids), is_tree]), draft.token_ids]
        if draft.parents is not None:
            parts.append(draft.parents)
    return np.concatenate(parts).astype(np.int64)


def _to_drafts(numbers: np.ndarray, step: ScheduledStep) -> dict[int, Draft]:
    """Raises InvariantError for what the step didn't ask for."""
    drafts: dict[int, Draft] = {}
    at = 0
    while at < len(numbers):
        index, count, is_tree = (*numbers[at : at + _HEAD].tolist(), 0, 0)[:_HEAD]
        begin = at + _HEAD
        at = begin + (2 if is_tree else 1) * count
        asked = step.sequences[index].draft if 0 <= index < len(step.sequences) else None
        if asked is None or not 0 < count <= asked.length or at > len(numbers):
            raise InvariantError(
                f"step {step.step_id}: a draft of {count} tokens came for sequence {index}, which "
                f"asked for {asked}"
            )
        parents = numbers[begin + count : at] if is_tree else None
        if parents is not None and ((parents < -1) | (parents >= np.arange(count))).any():
            raise InvariantError(
                f"step {step.step_id}: a draft's guesses come before their parents"
            )
        drafts[index] = Draft(numbers[begin : begin + count], parents)
    return drafts
