"""A stage before the last, step by step: what it hears of outcomes, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import InvariantError
from octavo.core.model_spec import KVFormat
from octavo.core.step import (
    BlockCopy,
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
    StageTime,
    StepOutput,
)
from octavo.models.pipeline_stage import PipelineStage
from octavo.runner.speculation import Draft
from octavo.runner.stage_runner import StageRunner
from octavo.weights import open_checkpoint
from support.backends import cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.sampling import bind
from support.stages import load_stages

PROMPT = tuple(int(token) for token in np.random.default_rng(1).integers(3, VOCAB_SIZE, 10))
OTHER = PROMPT[::-1]


class Ends:
    """A Pipeline of which a test is the other stages."""

    def __init__(self) -> None:
        self.drafts: dict[int, Draft] = {}
        self.sent: list[np.ndarray] = []
        """Activations of each step."""
        self.failures: list[str] = []
        self.times: list[list[StageTime]] = []

    def receive_drafts(self, step: ScheduledStep) -> dict[int, Draft]:
        return self.drafts

    def send(self, step_id: int, arrays: Sequence[np.ndarray]) -> None:
        (x,) = arrays
        self.sent.append(x)

    def send_times(self, step_id: int, times: Sequence[StageTime]) -> None:
        self.times.append(list(times))

    def receive_times(self, step_id: int) -> list[StageTime]:
        return []

    def fail(self, step: ScheduledStep, reason: str) -> None:
        self.failures.append(reason)

    def receive(self, step_id: int, shape: tuple[int, int, int]) -> np.ndarray:
        raise AssertionError("the first stage is given nothing")

    def send_drafts(self, step: ScheduledStep, drafts: Mapping[int, Draft]) -> None:
        raise AssertionError("the last stage alone sends drafts")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> PipelineStage:
    checkpoint = open_checkpoint(str(make_checkpoint("llama", tmp_path_factory.mktemp("llama"))))
    (stage,) = load_stages(checkpoint, cpu_backend("native"), [range(1)], num_positions=64)
    return stage


class Bench:
    def __init__(self, stage: PipelineStage, ends: Ends | None = None, **others: Any) -> None:
        """others: arguments of the runner."""
        self.ends = ends or Ends()
        self.runner = StageRunner(
            stage,
            cpu_backend("native"),
            self.ends,
            num_blocks=20,
            block_size=4,
            kv_format=KVFormat("float32"),
            max_num_seqs=2,
            max_model_len=64,
            **others,
        )

    def step(
        self,
        step_id: int,
        *sequences: ScheduledSequence,
        bindings: Sequence[SlotBinding] = (),
        copies: Sequence[BlockCopy] = (),
        outcomes: Sequence[StepOutput] = (),
    ) -> np.ndarray:
        """Activations of the step's tokens."""
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        self.runner.execute(
            ScheduledStep(step_id, list(bindings), list(sequences), list(copies), num_tokens),
            outcomes,
        )
        return self.ends.sent[-1]


@pytest.fixture
def bench(stage: PipelineStage) -> Bench:
    return Bench(stage)


def prompt(slot: int = 0, blocks: Sequence[int] = (1, 2, 3)) -> ScheduledSequence:
    return ScheduledSequence(slot, 0, 10, tuple(blocks), samples=True)


def outcome(step_id: int, *results: SequenceOutput) -> StepOutput:
    return StepOutput(step_id, list(results))


NEXT = ScheduledSequence(0, 10, 1, (), samples=True)


@pytest.fixture
def fresh(stage: PipelineStage) -> np.ndarray:
    """Activations of PROMPT and the token 7."""
    bench = Bench(stage)
    whole = bind(prompt=PROMPT, output=(7,))
    return bench.step(1, ScheduledSequence(0, 0, 11, (4, 5, 6), True), bindings=[whole])


def test_a_token_is_computed_once_its_outcome_is_told(bench: Bench, fresh: np.ndarray) -> None:
    x = bench.step(1, prompt(), bindings=[bind(prompt=PROMPT)])
    assert np.array_equal(x, fresh[:10])
    told = outcome(1, SequenceOutput(0, (7,)))
    assert np.array_equal(bench.step(2, NEXT, outcomes=[told]), fresh[10:])


def test_without_it_the_step_is_refused(bench: Bench) -> None:
    bench.step(1, prompt(), bindings=[bind(prompt=PROMPT)])
    with pytest.raises(InvariantError, match="slot 0 has tokens to compute that are not known"):
        bench.step(2, NEXT)
    assert bench.ends.failures == ["InvariantError"]


@pytest.mark.parametrize("step_id", [1, 3])
def test_an_outcome_is_told_once_and_of_steps_that_were(bench: Bench, step_id: int) -> None:
    bench.step(1, prompt(), bindings=[bind(prompt=PROMPT)])
    bench.step(2, NEXT, outcomes=[outcome(1, SequenceOutput(0, (7,)))])
    with pytest.raises(InvariantError, match=f"step {step_id} had its outcome, or was never"):
        bench.step(4, outcomes=[outcome(step_id, SequenceOutput(0, (8,)))])


def test_a_slot_that_another_sequence_has_taken_is_left_alone(
    bench: Bench, fresh: np.ndarray
) -> None:
    bench.step(1, prompt(), bindings=[bind(prompt=OTHER)])
    bench.step(2, prompt(blocks=(4, 5, 6)), bindings=[bind(prompt=PROMPT)])
    both = [outcome(1, SequenceOutput(0, (9,))), outcome(2, SequenceOutput(0, (7,)))]
    assert np.array_equal(bench.step(3, NEXT, outcomes=both), fresh[10:])


def test_failed_steps_have_no_outcome(bench: Bench, fresh: np.ndarray) -> None:
    bench.step(1, prompt(1), bindings=[bind(1, prompt=OTHER)])
    bench.step(2, prompt(blocks=(4, 5, 6)), bindings=[bind(prompt=PROMPT)])
    told = outcome(2, SequenceOutput(0, (7,)))
    assert np.array_equal(bench.step(3, NEXT, outcomes=[told]), fresh[10:])


def test_a_step_without_sequences_binds_and_copies(bench: Bench, fresh: np.ndarray) -> None:
    bench.step(1, prompt(), bindings=[bind(prompt=PROMPT)])
    num_sent = len(bench.ends.sent)
    bench.step(2, copies=[BlockCopy(0, 1, 2, 9)])
    assert len(bench.ends.sent) == num_sent
    told = [outcome(1, SequenceOutput(0, (7,))), outcome(2)]
    assert np.array_equal(bench.step(3, NEXT, outcomes=told), fresh[10:])


def test_what_was_accepted_of_a_tree_moves_when_it_is_told(
    bench: Bench, stage: PipelineStage
) -> None:
    bench.step(1, prompt(), bindings=[bind(prompt=PROMPT)])
    bench.ends.drafts = {0: Draft(np.array([20, 21, 22, 23]), np.array([-1, -1, 1, 1]))}
    drafted = NEXT._replace(new_block_ids=(7,), draft=DraftRequest(0, 4))
    bench.step(2, drafted, outcomes=[outcome(1, SequenceOutput(0, (7,)))])
    bench.ends.drafts = {}
    accepted = SequenceOutput(0, (21, 23, 30), num_drafts=4, accepted=(1, 3))
    last = ScheduledSequence(0, 13, 1, (), samples=True)
    x = bench.step(3, last, outcomes=[outcome(2, accepted)])

    plain = Bench(stage)
    whole = bind(prompt=PROMPT, output=(7, 21, 23, 30))
    step = ScheduledSequence(0, 0, 14, (4, 5, 6, 7), samples=True)
    assert np.array_equal(x, plain.step(1, step, bindings=[whole])[13:])


def test_an_error_appends_nothing(bench: Bench) -> None:
    bench.step(1, prompt(), bindings=[bind(prompt=PROMPT)])
    failed = outcome(1, SequenceOutput(0, (), error="it is broken"))
    with pytest.raises(InvariantError, match="of 10 tokens"):
        bench.step(2, NEXT, outcomes=[failed])


def test_waiting_for_another_stage_is_not_busy(stage: PipelineStage) -> None:
    now = 5.0

    class LateEnds(Ends):
        def receive_drafts(self, step: ScheduledStep) -> dict[int, Draft]:
            nonlocal now
            now += 10
            return {}

        def send(self, step_id: int, arrays: Sequence[np.ndarray]) -> None:
            nonlocal now
            now += 100

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    class Group:
        rank, size = 0, 2

        @property
        def seconds(self) -> float:
            return now / 8

    bench = Bench(stage, LateEnds(), group=Group(), clock=clock)
    bench.runner.execute(ScheduledStep(1, [bind(prompt=PROMPT)], [prompt()], [], 10))
    # Seen at 6; waits for drafts from 7 to 18, for activations from 19 to 20; done at 21.
    assert bench.ends.times == [[StageTime(21 - 6 - 11 - 1, 21 / 8 - 6 / 8)]]
