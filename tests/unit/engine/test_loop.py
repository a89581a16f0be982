"""The time of steps, as the loop counts it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import EngineStats
from octavo.engine.loop import EngineLoop
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.cost_model import CostModel
from octavo.simulator.executor import SimulatedExecutor
from octavo.simulator.work import StepWork

STEP_SECONDS = 0.5
PROMPT = 8


class EqualStages(CostModel):
    """Steps that all take equally long."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    num_stages = 1
    windows = ()

    def seconds(self, work: StepWork) -> float:
        return STEP_SECONDS


def pipeline(num_stages: int) -> tuple[EngineLoop, VirtualClock]:
    clock = VirtualClock()
    scheduler = SchedulerSettings(
        num_blocks=100,
        max_model_len=64,
        max_num_batched_tokens=PROMPT,
        block_size=4,
        max_num_seqs=32,
        num_stages=num_stages,
    ).build()
    executor = SimulatedExecutor(EqualStages(num_stages), clock, num_blocks=100)
    return EngineLoop(scheduler, executor, clock, depth=num_stages), clock


def requests(num: int, max_tokens: int, numbers: Iterator[int]) -> list[Request]:
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(range(100 * number, 100 * number + PROMPT)),
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            seed=number,
        )
        for number in (next(numbers) for _ in range(num))
    ]


def run(loop: EngineLoop, *given: Request) -> None:
    for request in given:
        loop.add(request)
    while loop.has_work:
        loop.step()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_prompts", [1, 2, 4, 8])
def test_the_bubble_of_prompts_that_pass_one_behind_another(
    num_stages: int, num_prompts: int
) -> None:
    """Each prompt is a step, and nothing counts while none runs."""
    loop, clock = pipeline(num_stages)
    numbers = count()
    before = loop.stats()
    for _ in range(2):
        run(loop, *requests(num_prompts, 1, numbers))
        idle = loop.stats().idle_share_since(before)
        assert idle == pytest.approx((num_stages - 1) / (num_prompts + num_stages - 1))
        clock.move_to(clock() + 100)


def test_one_stream_keeps_one_stage_busy() -> None:
    loop, _ = pipeline(4)
    run(loop, *requests(1, 20, count()))
    assert loop.stats().idle_share_since(EngineStats()) == pytest.approx(3 / 4)
    assert loop.stats().total_in_flight_seconds == pytest.approx(20 * STEP_SECONDS)


def test_as_many_streams_as_stages_keep_all_busy() -> None:
    loop, _ = pipeline(2)
    run(loop, *requests(2, 50, count()))
    idle = loop.stats().idle_share_since(EngineStats())
    assert idle == pytest.approx(0, abs=0.02)


def test_nothing_is_told_of_a_model_that_one_process_computes() -> None:
    loop, _ = pipeline(1)
    run(loop, *requests(2, 5, count()))
    stats = loop.stats()
    assert (stats.stages, stats.total_in_flight_seconds) == ((), 0.0)
    assert stats.idle_share_since(EngineStats()) is None
    assert stats.exchange_share_since(EngineStats()) is None
