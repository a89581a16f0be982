"""How long the scheduler takes a step, in plain Python, without a model.

    python benchmarks/scheduler.py [--sequences 256] [--steps 400]

Prints the time of `schedule` and of `update` per step while all sequences decode, and of a step
that admits prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledStep, SequenceOutput, StepOutput
from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.policies import policy_named
from octavo.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    args = parser.parse_args()

    count, length = args.sequences, args.prompt + args.steps + 2
    scheduler = Scheduler(
        BlockPool(count * (length // BLOCK_SIZE + 1)),
        policy_named("fcfs"),
        block_size=BLOCK_SIZE,
        max_num_seqs=count,
        max_num_batched_tokens=count * args.prompt,
        max_model_len=length,
    )
    for number in range(count):
        scheduler.add(
            Request(
                request_id=str(number),
                prompt_token_ids=tuple(range(number, number + args.prompt)),
                sampling=SamplingParams(max_tokens=args.steps + 1),
                max_tokens=args.steps + 1,
                seed=number,
            )
        )
    admit_ms, _ = timed_step(scheduler)
    schedule, update = [], []
    for _ in range(args.steps):
        one, other = timed_step(scheduler)
        schedule.append(one)
        update.append(other)
    print(
        json.dumps(
            {
                "sequences": count,
                "schedule_ms_median": round(statistics.median(schedule), 3),
                "schedule_ms_p99": round(statistics.quantiles(schedule, n=100)[98], 3),
                "update_ms_median": round(statistics.median(update), 3),
                "admission_step_ms": round(admit_ms, 3),
            }
        )
    )


def timed_step(scheduler: Scheduler) -> tuple[float, float]:
    """Milliseconds of `schedule` and of `update`."""
    start = time.perf_counter()
    step = scheduler.schedule(0.0)
    scheduled = time.perf_counter()
    if step is None:
        raise SystemExit("nothing was scheduled")
    output = answer(step)
    begin = time.perf_counter()
    scheduler.update(output, 0.0)
    return (scheduled - start) * 1e3, (time.perf_counter() - begin) * 1e3


def answer(step: ScheduledStep) -> StepOutput:
    outputs = [SequenceOutput(s.slot, (7,) if s.samples else ()) for s in step.sequences]
    return StepOutput(step.step_id, outputs)


if __name__ == "__main__":
    main()
