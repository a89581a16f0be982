"""What a scheduler was told and what it decided, as lines of JSON: enough to make it decide the
same again (see simulator/replay.py), and to learn what steps cost.

The first line is the scheduler's settings. Each line after it is one event with the engine clock's
seconds, in the order in which they happened: a request that came, an end, a step that was planned,
what came of it. Prompts are in it as token ids: who has the file can read them.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from octavo.core.clock import Clock
from octavo.core.errors import ConfigError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import (
    BlockCopy,
    DraftRequest,
    EngineStats,
    LiveLimits,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
    StepOutput,
    TokenDelta,
)
from octavo.engine.messages import Add, End, ForgetPrefixes
from octavo.scheduler.plan import Interrupted
from octavo.scheduler.settings import SchedulerSettings

FORMAT = 1
"""Goes up when a reader of an older version would misread the file."""

_MOST_LINES = 256

logger = logging.getLogger("octavo.engine")


class RecordedStep(NamedTuple):
    """A step as it was written. bindings: [slot, tokens known, prompt tokens, seed, digest of the
    tokens]. step: without them, since the tokens are the requests'.
    """

    bindings: list[list[Any]]
    step: ScheduledStep

    @classmethod
    def of(cls, step: ScheduledStep) -> Self:
        return cls([_binding(binding) for binding in step.bindings], step._replace(bindings=[]))


class StepFailed(NamedTuple):
    """In place of a StepOutput; what was running has ended."""

    error: str


class ExecutorLost(NamedTuple):
    """In place of a StepOutput, or between steps; what was running waits again."""


class Event(NamedTuple):
    """at: when, on the engine's clock. is_refused: of an Add that the scheduler did not accept."""

    at: float
    what: Add | End | ForgetPrefixes | RecordedStep | StepOutput | StepFailed | ExecutorLost
    is_refused: bool = False


@dataclass(frozen=True)
class Recording:
    """A file that was recorded, read as far as it is looked at."""

    path: Path
    settings: SchedulerSettings

    def events(self) -> Iterator[Event]:
        """Raises ConfigError where the file is damaged. An end in the middle of a line is one."""
        now, planned = -math.inf, None
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            next(lines)
            for number, line in enumerate(lines, start=2):
                if not line.endswith("\n"):
                    return  # the engine was ended while it wrote
                try:
                    event = _event(json.loads(line))
                    if not now <= event.at < math.inf:
                        raise ValueError(f"{event.at} s comes after {now} s")
                    now, planned = event.at, _planned(event.what, planned)
                except (AttributeError, KeyError, RequestError, TypeError, ValueError) as error:
                    raise ConfigError(
                        f"{self.path}, line {number} is no event of recorded steps: {error!r}"
                    ) from None
                yield event


def open_recording(path: Path) -> Recording:
    """Raises ConfigError for a file that isn't one."""
    try:
        with path.open(encoding="utf-8") as lines:
            head = json.loads(next(lines, "null"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it begins with no line of JSON"
        raise ConfigError(f"the recorded steps {path} can't be read: {reason}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ConfigError(
            f"{path} is no recording of this version: it is made by octavo serve --record-steps"
        )
    try:
        settings = head["settings"]
        settings["draft_lengths"] = tuple(settings["draft_lengths"])
        settings["seconds_by_rows"] = tuple((rows, s) for rows, s in settings["seconds_by_rows"])
        return Recording(path, SchedulerSettings(**settings))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} does not begin with a scheduler's settings ({error!r}): it is damaged"
        ) from None


class RecordedScheduler:
    """A scheduler that writes down what happens to it; like one for an EngineLoop. When it has
    nothing to do, all has been written.
    """

    def __init__(self, settings: SchedulerSettings, path: Path, clock: Clock) -> None:
        """Raises ConfigError if there is such a file, or it can't be written."""
        self._scheduler = settings.build()
        self._clock = clock
        self._path = path
        self._lines: list[str] = []  # that are not in the file yet
        self._is_writing = True
        head = json.dumps({"format": FORMAT, "settings": asdict(settings)})
        try:
            path.touch(mode=0o600, exist_ok=False)  # it has the prompts
            path.write_text(head + "\n", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(
                f"--record-steps {path} exists, and would be overwritten: name another file, or "
                "remove it"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--record-steps {path} can't be written ({error.strerror}): name another file"
            ) from None

    def add(self, request: Request) -> None:
        line = {"at": self._clock(), "add": _written_request(request)}
        try:
            self._scheduler.add(request)
        except RequestError:
            self._write(line | {"refused": True})
            raise
        self._write(line)

    def end(
        self,
        request_id: str,
        index: int | None,
        reason: FinishReason,
        now: float,
        error: str | None = None,
    ) -> list[TokenDelta]:
        self._write({"at": now, "end": [request_id, index, reason]})
        return self._scheduler.end(request_id, index, reason, now, error)

    def forget_prefixes(self) -> None:
        self._write({"at": self._clock(), "forget": True})
        self._scheduler.forget_prefixes()

    def set_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> LiveLimits:
        """Raises RequestError: a recording has one scheduler's settings."""
        raise RequestError("limits don't change while steps are recorded", status=409)

    def schedule(self, now: float) -> ScheduledStep | None:
        step = self._scheduler.schedule(now)
        if step is not None:
            self._write({"at": now, "step": _written_step(RecordedStep.of(step))})
        return step

    def update(self, output: StepOutput, now: float) -> list[TokenDelta]:
        self._write({"at": now, "output": _written_output(output)})
        deltas = self._scheduler.update(output, now)
        self._write_out_if_idle()
        return deltas

    def fail(self, error: str, now: float, *, running_only: bool) -> list[TokenDelta]:
        if running_only:  # else the engine is dead, and decides no more
            self._write({"at": now, "failed": error})
        deltas = self._scheduler.fail(error, now, running_only=running_only)
        self._write_out_if_idle()
        return deltas

    def start_over(self) -> list[Interrupted]:
        self._write({"at": self._clock(), "lost": True})
        return self._scheduler.start_over()

    def end_all(self, reason: FinishReason, now: float) -> list[TokenDelta]:
        """The last that happens."""
        deltas = self._scheduler.end_all(reason, now)
        self._write_out_if_idle()
        return deltas

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        if len(self._lines) >= _MOST_LINES:
            self._write_out()

    def _write_out_if_idle(self) -> None:
        if not self._scheduler.has_unfinished:
            self._write_out()

    def _write_out(self) -> None:
        """A full disk ends the recording, not the engine."""
        lines, self._lines = self._lines, []
        if not self._is_writing:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            logger.warning("no more steps are recorded in %s: %s", self._path, error.strerror)
            self._is_writing = False


# --- events as JSON -----------------------------------------------------------------------------


def _written_request(request: Request) -> dict[str, Any]:
    """What the scheduler looks at; what has its default is left out."""
    sampling = request.sampling
    values = {
        "id": request.request_id,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "arrival": request.arrival_time,
        "eos": sorted(request.eos_token_ids),
        "priority": request.priority,
        "salt": request.cache_salt,
        "n": sampling.n if sampling.n > 1 else None,
        "min_tokens": sampling.min_tokens,
        "stop": sorted(sampling.stop_token_ids),
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    return {name: value for name, value in values.items() if value or name in ("id", "seed")}


def _request(values: Mapping[str, Any]) -> Request:
    return Request(
        request_id=values["id"],
        prompt_token_ids=tuple(values["prompt"]),
        sampling=SamplingParams(
            n=values.get("n", 1),
            min_tokens=values.get("min_tokens", 0),
            max_tokens=None,
            stop_token_ids=tuple(values.get("stop", ())),
            prompt_logprobs=0 if values.get("prompt_logprobs") else None,
        ),
        max_tokens=values["max_tokens"],
        seed=values["seed"],
        eos_token_ids=frozenset(values.get("eos", ())),
        priority=values.get("priority", 0),
        arrival_time=values.get("arrival", 0.0),
        cache_salt=values.get("salt", ""),
    )


def _binding(binding: SlotBinding) -> list[Any]:
    digest = blake2b(array("q", binding.token_ids).tobytes(), digest_size=8).hexdigest()
    known, prompt = len(binding.token_ids), binding.num_prompt_tokens
    return [binding.slot, known, prompt, binding.seed, digest]


def _written_step(recorded: RecordedStep) -> list[Any]:
    bindings, step = recorded
    return [step.step_id, bindings, step.sequences, step.block_copies, step.num_tokens]


def _step(values: list[Any]) -> RecordedStep:
    step_id, bindings, sequences, copies, num_tokens = values
    return RecordedStep(
        bindings,
        ScheduledStep(
            step_id,
            [],
            [_sequence(*each) for each in sequences],
            [BlockCopy(*each) for each in copies],
            num_tokens,
        ),
    )


def _sequence(
    slot: int, start: int, count: int, blocks: list[int], samples: bool, draft: list[Any] | None
) -> ScheduledSequence:
    asked = None if draft is None else DraftRequest(*draft)
    return ScheduledSequence(slot, start, count, tuple(blocks), samples, asked)


def _written_output(output: StepOutput) -> dict[str, Any]:
    """Without log-probabilities, which nothing is decided by."""
    values: dict[str, Any] = {
        "step": output.step_id,
        "seconds": output.seconds,
        "sequences": [_written_result(result) for result in output.sequences],
    }
    if output.draft_seconds:
        values["draft_seconds"] = output.draft_seconds
    if output.catch_up_seconds:
        values["catch_up_seconds"] = output.catch_up_seconds
    return values


def _written_result(result: SequenceOutput) -> list[Any]:
    """[slot, token ids], and what else isn't as usual."""
    values: list[Any] = [result.slot, result.token_ids]
    extra = {
        "error": result.error,
        "is_refusal": result.is_refusal,
        "num_drafts": result.num_drafts,
        "accepted": result.accepted,
    }
    if unusual := {name: value for name, value in extra.items() if value not in (None, False, 0)}:
        values.append(unusual)
    return values


def _output(values: Mapping[str, Any]) -> StepOutput:
    return StepOutput(
        values["step"],
        [_result(*each) for each in values["sequences"]],
        values["seconds"],
        tuple(values.get("draft_seconds", ())),
        tuple(values.get("catch_up_seconds", ())),
    )


def _result(
    slot: int, token_ids: list[int], unusual: Mapping[str, Any] | None = None
) -> SequenceOutput:
    values = dict(unusual or {})
    if values.get("accepted") is not None:
        values["accepted"] = tuple(values["accepted"])
    return SequenceOutput(slot, tuple(token_ids), **values)


def _planned(what: object, planned: ScheduledStep | None) -> ScheduledStep | None:
    """The step whose output comes next, after `what`. Raises ValueError for that of another."""
    if isinstance(what, RecordedStep):
        return what.step
    if isinstance(what, StepFailed | ExecutorLost):
        return None
    if not isinstance(what, StepOutput):
        return planned
    wanted = None if planned is None else (planned.step_id, len(planned.sequences))
    if wanted != (what.step_id, len(what.sequences)):
        raise ValueError(f"the output of step {what.step_id} is not that of the step before it")
    return None


def _event(line: Mapping[str, Any]) -> Event:
    at = line["at"]
    match line:
        case {"step": values}:
            return Event(at, _step(values))
        case {"output": values}:
            return Event(at, _output(values))
        case {"add": values}:
            return Event(at, Add(_request(values)), line.get("refused", False))
        case {"end": [request_id, which, reason]}:
            return Event(at, End(request_id, which, FinishReason(reason)))
        case {"forget": True}:
            return Event(at, ForgetPrefixes())
        case {"failed": error}:
            return Event(at, StepFailed(error))
        case {"lost": True}:
            return Event(at, ExecutorLost())
    raise ValueError(f"there is no event of {', '.join(line)}")
