"""What several workers do for a model, and what they cost: the tables of docs/parallel.md.

    python benchmarks/parallel.py [--model default] [--only memory,exchanges,bubble,speed,copies]
                                  [--rounds 3] [--quick] [--json] [--plot bubble.svg]

memory: what each rank holds, as it is planned and as the system counts it, beside an even part of
the whole. exchanges: the share of steps that two tensor-parallel ranks spend on sums and gathers
(benchmarks/collectives.py times one of these, beside a memory copy and gloo). bubble: the share of
time in which stages have nothing to compute, beside (P - 1) / (m + P - 1). speed: engines that use
the same CPUs in different ways, in turns. copies: data parallelism beside one engine, on prompts
that share nothing and on some that share most.

Whatever has more workers than the machine has CPUs shows that it works, not what it is worth: busy
time is the clock's, and a worker that waits for a CPU counts as busy. So does one that other
programs keep from its CPU; below each table stands how much these have taken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams, assembly
from octavo.bench.metrics import tpot_seconds
from octavo.bench.progress import progress_bar
from octavo.bench.workloads.random_prompts import RandomPrompts
from octavo.config import Config
from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError
from octavo.executor.messages import WorkerPlan
from octavo.executor.multiproc import MultiprocExecutor
from octavo.executor.starting import worker_starter

LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
"""Tensor ranks and stages."""
SHORT_PROMPT, LONG_PROMPT = 64, 2048
STREAMS = (1, 8, 32)
IN_FLIGHT = (1, 2, 4, 8, 16)
STAGES = (2, 3, 4)

ONE, TWO_THREADS, TENSOR, PIPELINE, COPIES = (
    "1 process x 1 thread",
    "1 process x 2 threads",
    "TP 2 x 1 thread",
    "PP 2 x 1 thread",
    "DP 2 x 1 thread",
)
ENGINES: dict[str, dict[str, Any]] = {
    ONE: {"threads": 1},
    TWO_THREADS: {"threads": 2},
    TENSOR: {"tensor_parallel_size": 2, "threads": 1},
    PIPELINE: {"pipeline_parallel_size": 2, "threads": 1},
    COPIES: {"data_parallel_size": 2, "threads": 1},
}


@dataclass(frozen=True)
class MemoryRow:
    """What one rank has: MiB of weights, KiB of KV a token. planned: from its plan. even: of the
    whole, divided by the number of ranks. resident: what the system counts, of mapped weights, and
    of what the process grows by for each token of a long prompt. rest_mib: of the process, besides.
    """

    layout: str
    rank: int
    planned_weights_mib: float
    even_weights_mib: float
    resident_weights_mib: float
    planned_kv_kib: float
    even_kv_kib: float
    resident_kv_kib: float
    rest_mib: float


@dataclass(frozen=True)
class ExchangeRow:
    """Shares of the time in which ranks 0 were busy; idle_share: of that in which steps were in
    flight.
    """

    step: str
    num_tokens: int
    step_ms: float
    exchange_share: float
    idle_share: float


@dataclass(frozen=True)
class BubbleRow:
    """formula: (P - 1) / (m + P - 1). prompts: of m prompts, a step each, one behind another, to
    which the formula applies. streams: of m sequences that decode.
    """

    num_stages: int
    in_flight: int
    formula: float
    prompts: float
    streams: float


@dataclass(frozen=True)
class SpeedRow:
    """Medians over rounds, and how far they lie apart: (most - least) / median."""

    workload: str
    engine: str
    tokens_per_s: float
    spread: float
    tpot_ms: float
    tpot_spread: float


Row = MemoryRow | ExchangeRow | BubbleRow | SpeedRow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once, with few tokens")
    parser.add_argument("--json", action="store_true", help="one object a line, no tables")
    parser.add_argument("--plot", type=Path, help="where to draw the bubble")
    args = parser.parse_args()
    trial = Trial(args.model, 1 if args.quick else args.rounds, 8 if args.quick else 64)
    for name in args.only.split(","):
        if name not in SECTIONS:
            raise SystemExit(f"--only: {name!r} is none of {', '.join(SECTIONS)}")
        title, section = SECTIONS[name]
        if not args.json:
            print(f"\n### {title}\n")
        others = OtherProcesses()
        rows = section(trial)
        for line in map(json.dumps, map(asdict, rows)) if args.json else _table(rows):
            print(line, flush=True)
        if not args.json:
            print(f"\nMeanwhile other processes took {others.share():.0%} of the machine's CPUs.")
        if name == "bubble" and args.plot is not None:
            from parallel_plot import draw  # matplotlib is there only for pictures

            draw(args.plot, rows)


@dataclass(frozen=True)
class Trial:
    """new_tokens: that each stream generates."""

    model: str
    rounds: int
    new_tokens: int

    def llm(self, **settings: Any) -> LLM:
        return LLM(self.model, **settings)


# --- memory ------------------------------------------------------------------------------------


def measure_memory(trial: Trial) -> list[MemoryRow]:
    found: list[MemoryRow] = []
    for tensor, stages in LAYOUTS:
        layout = {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "max_num_batched_tokens": SHORT_PROMPT,
        }
        try:
            found += _ranks(trial, layout, found[0] if found else None)
        except ConfigError as refusal:
            print(f"TP {tensor} x PP {stages}: {refusal}\n", file=sys.stderr)
    return found


def _ranks(trial: Trial, layout: dict[str, int], whole: MemoryRow | None) -> Iterator[MemoryRow]:
    """whole: what one worker has; None if there is one."""
    config = Config.from_flat({"model": trial.model, **layout})
    block_size = config.cache.block_size
    plans = _plans(config)
    num_bytes = max(plan.block_bytes for plan in plans) * LONG_PROMPT // block_size
    sizes = {"kv_cache_memory_bytes": num_bytes, "max_model_len": LONG_PROMPT}
    others = set(_children())
    with closing_llm(trial.llm(**layout, **sizes)) as llm:
        pids = [pid for pid in _children() if pid not in others] or [os.getpid()]
        prompts = RandomPrompts(llm.vocab_size, 0)
        run(llm, [prompts.take(SHORT_PROMPT)], 16)  # all buffers are there then
        before = [_resident_mib(pid) for pid in pids]
        run(llm, [prompts.take(LONG_PROMPT - block_size)], 1)
        after = [_resident_mib(pid) for pid in pids]
    for rank, (plan, (_, small), (mapped, large)) in enumerate(
        zip(plans, before, after, strict=True)
    ):
        weights, kv = plan.weight_bytes / 2**20, plan.block_bytes / block_size / 2**10
        yield MemoryRow(
            " x ".join(f"{name[0].upper()}P {layout[name]}" for name in list(layout)[:2]),
            rank,
            planned_weights_mib=weights,
            even_weights_mib=(whole.planned_weights_mib if whole else weights) / len(plans),
            resident_weights_mib=mapped,
            planned_kv_kib=kv,
            even_kv_kib=(whole.planned_kv_kib if whole else kv) / len(plans),
            resident_kv_kib=(large - small)
            * 2**10
            / (LONG_PROMPT - block_size - SHORT_PROMPT - 16),
            rest_mib=small - mapped,
        )


def _plans(config: Config) -> Sequence[WorkerPlan]:
    """Of workers that are started for nothing else. Raises ConfigError."""
    checkpoint = assembly.open_model(config.model)
    vocab_size = assembly.vocab_size(checkpoint, assembly.load_text(config.model, checkpoint))
    start, launcher = worker_starter(config, vocab_size, checkpoint, 0)
    executor = MultiprocExecutor(start, launcher, config.parallel.pipeline_parallel_size)
    executor.shutdown()
    return executor.plans


def _children() -> list[int]:
    """Processes that this one has started, the oldest first."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sorted(map(int, children))


def _resident_mib(pid: int) -> tuple[float, float]:
    """Of mapped weights, and in all: its own, and its part of what it shares."""
    mapped = total = 0
    is_weights = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_weights = line.endswith(".weights")
        elif name == "Pss:":
            total += int(values[0])
            mapped += int(values[0]) if is_weights else 0
    return mapped / 1024, total / 1024


# --- exchanges ---------------------------------------------------------------------------------


def measure_exchanges(trial: Trial) -> list[ExchangeRow]:
    with closing_llm(trial.llm(**ENGINES[TENSOR], enable_prefix_caching=False)) as llm:
        prompts = RandomPrompts(llm.vocab_size, seed=1)
        rows = []
        cases = [("decode", n, 16, trial.new_tokens) for n in STREAMS]
        cases += [("prefill", n, n, 1) for n in (64, 512)]
        for name, count, length, new_tokens in progress(cases, "exchanges"):
            num_streams = count if name == "decode" else 1
            seconds, shares, idle = [], [], []
            for _ in range(trial.rounds + 1):
                run(llm, [prompts.take(length) for _ in range(num_streams)], new_tokens)
                before = llm.get_metrics()
                run(llm, [prompts.take(length) for _ in range(num_streams)], new_tokens)
                after = llm.get_metrics()
                steps = after.total_steps - before.total_steps
                taken = after.total_in_flight_seconds - before.total_in_flight_seconds
                seconds.append(taken / steps)
                shares.append(after.exchange_share_since(before) or 0.0)
                idle.append(after.idle_share_since(before) or 0.0)
            median = statistics.median
            rows.append(
                ExchangeRow(name, count, 1e3 * median(seconds), median(shares), median(idle))
            )
        return rows


# --- the bubble --------------------------------------------------------------------------------


def measure_bubble(trial: Trial) -> list[BubbleRow]:
    rows = []
    for stages in STAGES:
        llm = trial.llm(
            pipeline_parallel_size=stages,
            threads=1,
            max_num_batched_tokens=128,  # a prompt: each is a step
            max_num_seqs=max(IN_FLIGHT),
            enable_prefix_caching=False,
        )
        with closing_llm(llm):
            prompts = RandomPrompts(llm.vocab_size, seed=2)

            def idle(
                count: int,
                length: int,
                new_tokens: int,
                llm: LLM = llm,
                prompts: RandomPrompts = prompts,
            ) -> float:
                shares = []
                for _ in range(2 * trial.rounds):
                    before = llm.get_metrics()
                    run(llm, [prompts.take(length) for _ in range(count)], new_tokens)
                    shares.append(llm.get_metrics().idle_share_since(before) or 0.0)
                return statistics.median(shares)

            idle(stages, 128, 4)
            for count in progress(IN_FLIGHT, f"bubble of {stages} stages"):
                formula = (stages - 1) / (count + stages - 1)
                rows.append(
                    BubbleRow(
                        stages,
                        count,
                        formula,
                        prompts=idle(count, 128, 1),
                        streams=idle(count, 4, trial.new_tokens),
                    )
                )
    return rows


# --- speed -------------------------------------------------------------------------------------


def measure_speed(trial: Trial) -> list[SpeedRow]:
    names = (ONE, TWO_THREADS, TENSOR, PIPELINE, COPIES)
    return _in_turns(
        trial,
        names,
        {
            f"{count} streams" if count > 1 else "1 stream": _plain(count, 32, trial.new_tokens)
            for count in STREAMS
        },
    )


def measure_copies(trial: Trial) -> list[SpeedRow]:
    workloads = {
        "nothing shared: 32 prompts of 256 tokens, 16 new": _plain(32, 256, 16),
        "8 prefixes of 384 tokens, 4 questions of 16 to each, 16 new": _shared(8, 384, 4, 16, 16),
    }
    return _in_turns(trial, (ONE, TWO_THREADS, COPIES), workloads)


Workload = Callable[[RandomPrompts], tuple[list[list[int]], int]]
"""New prompts, and how many tokens each is to have generated."""


def _plain(count: int, length: int, new_tokens: int) -> Workload:
    return lambda prompts: ([prompts.take(length) for _ in range(count)], new_tokens)


def _shared(groups: int, prefix: int, members: int, own: int, new_tokens: int) -> Workload:
    """Questions to one prefix come one after another, not at once."""

    def make(prompts: RandomPrompts) -> tuple[list[list[int]], int]:
        prefixes = [prompts.take(prefix) for _ in range(groups)]
        return [
            beginning + prompts.take(own) for _ in range(members) for beginning in prefixes
        ], new_tokens

    return make


def _in_turns(trial: Trial, names: Sequence[str], workloads: dict[str, Workload]) -> list[SpeedRow]:
    """All engines are there all the time; those whose turn it isn't sleep."""
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(closing_llm(trial.llm(**ENGINES[name]))) for name in names
        }
        prompts = RandomPrompts(next(iter(llms.values())).vocab_size, seed=3)
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for llm in llms.values():
            run(llm, *_plain(8, 32, 8)(prompts))
        turns = list(product(range(trial.rounds), workloads, names))
        for _, workload, name in progress(turns, "rounds"):
            given, new_tokens = workloads[workload](prompts)
            start = monotonic()
            tpots = run(llms[name], given, new_tokens)
            seconds = monotonic() - start
            rate = len(given) * new_tokens / seconds
            found.setdefault((workload, name), []).append((rate, 1e3 * statistics.median(tpots)))
    return [
        SpeedRow(workload, name, *_median_and_spread(rates), *_median_and_spread(tpots))
        for (workload, name), values in found.items()
        for rates, tpots in [zip(*values, strict=True)]
    ]


def _median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median


# --- what all use ------------------------------------------------------------------------------


class OtherProcesses:
    """What they take of the machine, from when it is made. Workers must be started after that, and
    have ended when it is asked.
    """

    def __init__(self) -> None:
        self._since = self._now()

    def share(self) -> float:
        """Of the time of all CPUs; figures beside more than a few per cent mean little."""
        busy, total, own = [b - a for a, b in zip(self._since, self._now(), strict=True)]
        return max(0.0, busy - own) / total

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds since the start: of busy CPUs, of all CPUs, and of this process's work."""
        ticks = [int(value) for value in Path("/proc/stat").read_text().split()[1:9]]
        idle, total = ticks[3] + ticks[4], sum(ticks)  # the fourth is idle, the fifth waits for I/O
        per_second = os.sysconf("SC_CLK_TCK")
        own = os.times()
        own_seconds = own.user + own.system + own.children_user + own.children_system
        return (total - idle) / per_second, total / per_second, own_seconds


@contextmanager
def closing_llm(llm: LLM) -> Iterator[LLM]:
    try:
        yield llm
    finally:
        llm.shutdown()


def run(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
    """Greedy continuations of exactly so many tokens; seconds for each of them after the first."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
    )
    found = [tpot_seconds(output.times, new_tokens) for output in outputs if output.times]
    return [seconds for seconds in found if seconds is not None] or [0.0]


def progress(items: Sequence[Any], name: str) -> Iterator[Any]:
    with progress_bar(name, len(items)) as advance:
        for item in items:
            yield item
            advance()


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """In markdown."""
    if not rows:
        return
    names = list(asdict(rows[0]))
    yield "| " + " | ".join(name.replace("_", " ") for name in names) + " |"
    yield "|" + "|".join("---" for _ in names) + "|"
    for row in rows:
        yield "| " + " | ".join(_cell(name, v) for name, v in asdict(row).items()) + " |"


def _cell(name: str, value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if "share" in name or "spread" in name or name in ("formula", "prompts", "streams"):
        return f"{value:.1%}"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


SECTIONS: dict[str, tuple[str, Callable[[Trial], Sequence[Row]]]] = {
    "memory": ("What each rank holds", measure_memory),
    "exchanges": ("Exchanges between two tensor-parallel ranks", measure_exchanges),
    "bubble": ("The bubble of a pipeline", measure_bubble),
    "speed": ("The same two CPUs", measure_speed),
    "copies": ("Two copies beside one", measure_copies),
}


if __name__ == "__main__":
    main()
