"""Steps as a timeline: Chrome's trace events, which ui.perfetto.dev and chrome://tracing show.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledSequence, ScheduledStep

_STEPS, _SLOTS = 1, 2  # the two groups of tracks, "processes" to the format
_US = 1e6


class _Decoding(NamedTuple):
    """A piece that may go on."""

    start_s: float
    end_s: float
    num_steps: int
    last_step_id: int


class StepTrace:
    """An OnStep that writes what it sees: a track of steps (of a pipeline as many as are computed
    at once), curves of what is in them, and a track for each slot, in which a sequence's decoding
    is one piece as long as no step leaves it out, but for those that are computed at once with its
    own.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file can't be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--trace {path} can't be written ({error.strerror}): name another file"
            ) from None
        self._prompt_tokens: dict[int, int] = {}  # by slot
        self._decoding: dict[int, _Decoding] = {}  # by slot
        self._track_ends: list[float] = []  # of each track of steps: when its last one ends
        self._file.write("[\n")
        for group, name in ((_STEPS, "engine"), (_SLOTS, "slots")):
            self._write({"ph": "M", "pid": group, "name": "process_name", "args": {"name": name}})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for slot in list(self._decoding):
            self._end_decoding(slot)
        # The list's last element has no comma after it.
        self._file.write(json.dumps({"ph": "M", "pid": _STEPS, "name": "end"}) + "\n]\n")
        self._file.close()

    def __call__(self, step: ScheduledStep, start_s: float, end_s: float) -> None:
        for binding in step.bindings:
            self._end_decoding(binding.slot)
            self._prompt_tokens[binding.slot] = binding.num_prompt_tokens
        num_decoding = num_drafts = 0
        for sequence in step.sequences:
            if sequence.start >= self._prompt_tokens.get(sequence.slot, 0):
                num_decoding += 1
                num_drafts += 0 if sequence.draft is None else sequence.draft.length
                self._decode(step.step_id, sequence.slot, start_s, end_s)
            else:
                self._end_decoding(sequence.slot)
                self._chunk(sequence, start_s, end_s)
        args = {
            "tokens": step.num_tokens,
            "sequences": len(step.sequences),
            "decoding": num_decoding,
            "prompt tokens": step.num_tokens - num_decoding,
            "drafts": num_drafts,
            "new": len(step.bindings),
        }
        track = self._free_track(start_s, end_s)
        self._piece(_STEPS, track, f"step {step.step_id}", start_s, end_s, args)
        for name, values in (
            ("sequences", {"sequences": len(step.sequences)}),
            ("tokens", {"decoding": num_decoding, "prompts": step.num_tokens - num_decoding}),
        ):
            event = {"ph": "C", "pid": _STEPS, "ts": start_s * _US, "name": name, "args": values}
            self._write(event)

    def _chunk(self, sequence: ScheduledSequence, start_s: float, end_s: float) -> None:
        args = {"start": sequence.start, "tokens": sequence.num_tokens}
        name = f"prompt {sequence.num_tokens}"
        self._piece(_SLOTS, sequence.slot, name, start_s, end_s, args)

    def _decode(self, step_id: int, slot: int, start_s: float, end_s: float) -> None:
        begun = self._decoding.get(slot)
        # By steps and not by time: engines need some between two steps.
        if begun is not None and step_id - begun.last_step_id > max(1, len(self._track_ends)):
            self._end_decoding(slot)
            begun = None
        first_s, count = (start_s, 0) if begun is None else (begun.start_s, begun.num_steps)
        self._decoding[slot] = _Decoding(first_s, end_s, count + 1, step_id)

    def _end_decoding(self, slot: int) -> None:
        if (begun := self._decoding.pop(slot, None)) is not None:
            start_s, end_s, count, _ = begun
            self._piece(_SLOTS, slot, f"decode {count}", start_s, end_s, {"steps": count})

    def _free_track(self, start_s: float, end_s: float) -> int:
        """The first in which nothing else is computed then: pieces of a track may not overlap."""
        ends = self._track_ends
        track = next((i for i, end in enumerate(ends) if end <= start_s), len(ends))
        ends[track : track + 1] = [end_s]
        return track

    def _piece(
        self, group: int, track: int, name: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> None:
        self._write(
            {
                "ph": "X",
                "pid": group,
                "tid": track,
                "name": name,
                "ts": start_s * _US,
                "dur": (end_s - start_s) * _US,
                "args": args,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + ",\n")
