"""An executor that computes nothing: it says what a step took, and makes tokens up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.core.step import (
    DraftRequest,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
    Stages,
    StageTime,
    StepOutput,
)
from octavo.executor.base import Executor
from octavo.simulator.clock import PassingClock
from octavo.simulator.cost_model import CostModel
from octavo.simulator.work import work_of

AnswerLength = Callable[[SlotBinding], int]
"""Tokens that a sequence generates, the one that ends it among them."""
OnStep = Callable[[ScheduledStep, float, float], None]
"""Told of each step, and from when until when it is computed."""

_NOT_SIMULATED = "there are no log-probabilities without a model; leave logprobs out"
_MASK = (1 << 64) - 1


class _Peculiar(NamedTuple):
    """Of a sequence that does more than go on. end: the position of the token that ends it, and
    this token. is_refused: it asked for what only a model can give.
    """

    end: tuple[int, int] | None
    is_refused: bool


class SimulatedExecutor(Executor):
    """An Executor. Its tokens depend on the sequence's seed and the position alone, so that a
    prefix cache works: a sequence that is computed again comes to the same ones.

    A step takes the seconds that `costs` says, by `clock`. Of a pipeline with several stages as
    many steps are computed at once. slack_s: a step that comes so soon after the one before began
    with its end: what the host does in between is in the costs.

    answer_length: of sequences that have a token to end with; None: all go on to their max_tokens.
    acceptance: of each method that guesses, the probability that a guess is accepted if the one
    before it was; there are always as many guesses as asked for. token_ids: that answers are made
    of. on_step: looks on.
    """

    def __init__(
        self,
        costs: CostModel,
        clock: PassingClock,
        *,
        num_blocks: int,
        slack_s: float = 0.0,
        answer_length: AnswerLength | None = None,
        acceptance: Sequence[float] = (),
        token_ids: Sequence[int] = range(1 << 30),
        on_step: OnStep | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_steps_in_flight = costs.num_stages
        self._costs = costs
        self._windows = costs.windows
        self._clock = clock
        self._slack_s = slack_s
        self._answer_length = answer_length
        self._acceptance = tuple(acceptance)
        self._token_ids = token_ids
        self._on_step = on_step
        self._free_s = -math.inf  # when the first stage is
        self._end_s = -math.inf  # of the newest step
        self._seeds: dict[int, int] = {}  # by slot
        self._peculiar: dict[int, _Peculiar] = {}

    def submit(self, step: ScheduledStep) -> SimulatedStep:
        for binding in step.bindings:
            self._bind(binding)
        work = work_of(step, self._windows)
        seconds = self._costs.seconds(work)
        draft_seconds = self._costs.draft_seconds(work) if work.num_drafting else 0.0
        start_s, free_s = self._clock(), self._free_s
        if free_s > start_s - self._slack_s:
            start_s = free_s
        stage_seconds = (seconds + draft_seconds) / self.max_steps_in_flight
        # A short step doesn't overtake a long one, which has the last stage until it ends.
        end_s = max(start_s + seconds + draft_seconds, self._end_s + stage_seconds)
        self._free_s, self._end_s = start_s + stage_seconds, end_s
        if self._on_step is not None:
            self._on_step(step, start_s, end_s)
        output = StepOutput(
            step.step_id,
            self._outputs(step),
            seconds,
            self._by_method(step, draft_seconds) if work.num_drafting else (),
            stages=self._stages(stage_seconds),
        )
        return SimulatedStep(output, end_s, self._clock)

    def shutdown(self) -> None:
        self._seeds.clear()
        self._peculiar.clear()

    def _outputs(self, step: ScheduledStep) -> list[SequenceOutput]:
        seeds, peculiar = self._seeds, self._peculiar
        token_ids, num_ids = self._token_ids, len(self._token_ids)
        outputs = []
        for slot, start, num_tokens, _, samples, draft in step.sequences:
            if draft is not None or slot in peculiar:
                outputs.append(self._output(slot, start + num_tokens, samples, draft))
            elif samples:
                token = token_ids[(seeds[slot] + start + num_tokens) % num_ids]
                outputs.append(SequenceOutput(slot, (token,)))
            else:
                outputs.append(SequenceOutput(slot, ()))
        return outputs

    def _stages(self, stage_seconds: float) -> Stages:
        count = self.max_steps_in_flight
        return (StageTime(stage_seconds),) * count if count > 1 else ()

    def _by_method(self, step: ScheduledStep, draft_seconds: float) -> tuple[float, ...]:
        """Shared among the methods by how many sequences each guesses for."""
        counts = [0] * len(self._acceptance)
        for sequence in step.sequences:
            if sequence.draft is not None:
                counts[sequence.draft.method] += 1
        return tuple([draft_seconds * count / sum(counts) for count in counts])

    def _bind(self, binding: SlotBinding) -> None:
        slot, sampling = binding.slot, binding.sampling
        self._seeds[slot] = binding.seed
        self._peculiar.pop(slot, None)
        end = None
        if self._answer_length is not None and binding.eos_token_ids:
            length = max(self._answer_length(binding), sampling.min_tokens + 1)
            end = (binding.num_prompt_tokens + length - 1, min(binding.eos_token_ids))
        is_refused = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        if end is not None or is_refused:
            self._peculiar[slot] = _Peculiar(end, is_refused)

    def _output(
        self, slot: int, position: int, samples: bool, draft: DraftRequest | None
    ) -> SequenceOutput:
        """position: of the next token."""
        end, is_refused = self._peculiar.get(slot, _Peculiar(None, False))
        if is_refused:
            return SequenceOutput(slot, (), error=_NOT_SIMULATED, is_refusal=True)
        if not samples:
            return SequenceOutput(slot, ())
        seed, token_ids = self._seeds[slot], self._token_ids
        num_drafts = num_accepted = 0
        if draft is not None:
            num_drafts, acceptance = draft.length, self._acceptance[draft.method]
            num_accepted = _num_accepted(acceptance, num_drafts, seed, position)
        positions = range(position, position + num_accepted + 1)
        tokens = [token_ids[(seed + place) % len(token_ids)] for place in positions]
        if end is not None and end[0] in positions:
            tokens[end[0] - position] = end[1]
        return SequenceOutput(slot, tuple(tokens), num_drafts=num_drafts)


class SimulatedStep:
    """A PendingStep."""

    __slots__ = ("_clock", "_end_s", "_output")

    def __init__(self, output: StepOutput, end_s: float, clock: PassingClock) -> None:
        self._output = output
        self._end_s = end_s
        self._clock = clock

    def result(self) -> StepOutput:
        self._clock.move_to(self._end_s)
        return self._output


def _num_accepted(acceptance: float, length: int, seed: int, position: int) -> int:
    """Of `length` guesses, those before the first that is not accepted. The same seed and position
    have the same luck, whatever else runs: settings can be compared request by request.
    """
    if not 0 < acceptance < 1:
        return length if acceptance else 0
    luck = uniform(seed, position)
    return min(length, int(math.log(luck) / math.log(acceptance)))


def uniform(seed: int, position: int) -> float:
    """In (0, 1], by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) + 1) / (1 << 64)
