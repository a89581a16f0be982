"""Where the time of a step goes: real steps of an engine, with a clock between its parts.

A step is cut at the calls of the recorded functions (forward, head), which tell afterwards what
their regions took; what lies before, between and behind them is Python. Bytes and operations say
how long a part would take if nothing but the machine's limits held it up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from octavo import assembly
from octavo.bench.engines import described
from octavo.bench.progress import progress_bar
from octavo.bench.workloads.random_prompts import RandomPrompts
from octavo.config import Config
from octavo.core.errors import ConfigError, InvariantError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledStep
from octavo.executor.base import Executor, PendingStep
from octavo.ops.native.limits import Limits, LimitsMeter
from octavo.ops.native.recorder import Recorded, RegionTime

if TYPE_CHECKING:
    from octavo.engine.loop import EngineLoop
    from octavo.ops.backend import Backend

F = TypeVar("F", bound=Callable[..., Any])

PRODUCT, ATTENTION, ROWS, EXCHANGE, SAMPLING, PYTHON = (
    "matrix product",
    "attention",
    "rows",
    "exchange",
    "sampling",
    "python",
)
"""Kinds of parts, in the order in which they are shown. rows: ops on each row by itself, such as
norms. exchange: between tensor-parallel ranks, waiting included. python: scheduling, laying out the
batch, calling what is recorded.
"""
UNDIVIDED = "undivided"
"""Calls of a backend that does not record: all of their ops together."""

_NUM_WARM_UPS = 2
_NUM_PREFILLS = 8
_NUM_DECODE_STEPS = 48


@dataclass(frozen=True)
class Part:
    """What is alike in a step. count: regions a step. num_bytes: weights and cache that they read.
    least_seconds: what the machine's limits would allow; None where bytes and operations are not
    counted.
    """

    kind: str
    name: str
    count: float
    seconds: float
    num_bytes: float
    operations: float
    least_seconds: float | None


@dataclass(frozen=True)
class StepProfile:
    """Means of the faster half of the steps, because what else the machine does only slows them.

    name: "decode" or "prefill". num_tokens: computed in a step, or in all steps of one prompt;
    seconds the same. context: tokens of the longest sequence, at most. parts: without gaps, the
    slowest of a kind first.
    """

    name: str
    num_sequences: int
    num_tokens: int
    context: int
    num_measured: int
    parts: list[Part]
    read_bytes_per_second: float

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def bandwidth_share(self) -> float:
        """The bytes over the read bandwidth, in shares of the whole step."""
        return self.num_bytes / self.read_bytes_per_second / self.seconds

    @property
    def roofline_share(self) -> float:
        """What the limits allow for products and attention, in shares of the whole step."""
        return sum(part.least_seconds or 0.0 for part in self.parts) / self.seconds

    @property
    def other_share(self) -> float | None:
        """Of all that is neither a matrix product nor attention; None if that can't be told."""
        if any(part.kind == UNDIVIDED for part in self.parts):
            return None
        computing = (p.seconds for p in self.parts if p.kind in (PRODUCT, ATTENTION))
        return 1 - sum(computing) / self.seconds


@dataclass(frozen=True)
class Profile:
    """Steps of one engine, next to the limits measured before and after them."""

    settings: dict[str, str]
    limits: Limits
    steps: list[StepProfile]


class _Call(NamedTuple):
    """Of a compiled function; its regions, if it is recorded."""

    start: float
    end: float
    regions: list[RegionTime]


@dataclass
class _Cut:
    """One step with the times between which its parts lie."""

    start: float
    submitted: float
    returned: float
    end: float
    calls: list[_Call]
    step: ScheduledStep


class _Clock:
    """The probe: sees the calls of compiled functions, and the submission of steps."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float, Callable[..., Any]]] = []
        self.submission: tuple[float, float, ScheduledStep] | None = None

    def on_backend(self, backend: Backend) -> Backend:
        return cast("Backend", _TimedBackend(backend, self))

    def on_executor(self, executor: Executor) -> Executor:
        return _TimedExecutor(executor, self)

    def cut(self, loop: EngineLoop) -> _Cut:
        """Run one step of the engine, in which no compiled function is called twice."""
        self.calls.clear()
        start = time.perf_counter()
        loop.step()
        end = time.perf_counter()
        if self.submission is None:
            raise InvariantError("the engine took a step that was not submitted")
        submitted, returned, step = self.submission
        calls = [
            _Call(begun, ended, call.region_times() if isinstance(call, Recorded) else [])
            for begun, ended, call in self.calls
        ]
        return _Cut(start, submitted, returned, end, calls, step)


class _TimedBackend:
    """A backend whose compiled functions are timed."""

    def __init__(self, backend: Backend, clock: _Clock) -> None:
        self._backend = backend
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def compile(self, function: F) -> F:
        compiled = self._backend.compile(function)
        if isinstance(compiled, Recorded):
            compiled.timed = True

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = compiled(*args)
            self._clock.calls.append((start, time.perf_counter(), compiled))
            return result

        return cast(F, timed)


class _TimedExecutor(Executor):
    """An executor whose submissions are timed. Each waits for its step: one is in flight."""

    max_steps_in_flight = 1

    def __init__(self, executor: Executor, clock: _Clock) -> None:
        self.num_blocks = executor.num_blocks
        self._executor = executor
        self._clock = clock

    def submit(self, step: ScheduledStep) -> PendingStep:
        start = time.perf_counter()
        pending = self._executor.submit(step)
        self._clock.submission = (start, time.perf_counter(), step)
        return pending

    def shutdown(self) -> None:
        self._executor.shutdown()


def profile(
    config: Config, *, batch: int, context: int, prompt: int, temperature: float
) -> Profile:
    """Profile decode steps of `batch` sequences behind `context` tokens each, and the prefill of
    `prompt` tokens. Raises ConfigError if they don't fit the engine.
    """
    clock = _Clock()
    checkpoint = assembly.open_model(config.model)
    text = assembly.load_text(config.model, checkpoint)
    vocab_size = assembly.vocab_size(checkpoint, text)
    meter = LimitsMeter(config.backend.threads)
    before = meter.measure()
    loop, facts = assembly.build_engine(config, vocab_size, checkpoint=checkpoint, probe=clock)
    try:
        requests = _Requests(vocab_size, config.model.seed or 0, temperature)
        num_decodes = _NUM_WARM_UPS + _NUM_DECODE_STEPS
        _check_length("--context", context + num_decodes, facts.max_model_len)
        _check_length("--prompt", prompt + 1, facts.max_model_len)
        if batch > config.scheduler.max_num_seqs:
            raise ConfigError(
                f"--batch {batch} is more than --max-num-seqs {config.scheduler.max_num_seqs}; "
                "raise that one"
            )
        with progress_bar("Steps", _NUM_PREFILLS + num_decodes) as advance:
            room = facts.max_model_len - context
            decodes = _decode_steps(loop, clock, requests, batch, context, room, advance)
            prefills = _prefill_steps(loop, clock, requests, prompt, advance)
    finally:
        loop.close()
    limits = before.best_of(meter.measure())
    return Profile(
        settings=described(checkpoint.name, facts),
        limits=limits,
        steps=[
            _step_profile("decode", decodes, limits),
            _step_profile("prefill", prefills, limits),
        ],
    )


def _check_length(flag: str, length: int, max_model_len: int) -> None:
    if length > max_model_len:
        raise ConfigError(
            f"{flag}: {length} tokens with what is generated, more than the {max_model_len} of the "
            "context; lower it, or raise --max-model-len"
        )


class _Requests:
    """New requests, each with a prompt that nothing has seen."""

    def __init__(self, vocab_size: int, seed: int, temperature: float) -> None:
        self._prompts = RandomPrompts(vocab_size, seed)
        self._sampling = SamplingParams(temperature=temperature, ignore_eos=True)
        self._count = 0

    def take(self, num_prompt_tokens: int, max_tokens: int) -> Request:
        self._count += 1
        return Request(
            request_id=str(self._count),
            prompt_token_ids=tuple(self._prompts.take(num_prompt_tokens)),
            sampling=self._sampling,
            max_tokens=max_tokens,
            seed=self._count,
        )


def _decode_steps(
    loop: EngineLoop,
    clock: _Clock,
    requests: _Requests,
    batch: int,
    context: int,
    max_tokens: int,
    advance: Callable[[], None],
) -> list[list[_Cut]]:
    """Steps in which every sequence computes one token."""
    for _ in range(batch):
        loop.add(requests.take(context, max_tokens))
    found: list[list[_Cut]] = []
    while len(found) < _NUM_WARM_UPS + _NUM_DECODE_STEPS:
        if not loop.has_work:
            raise ConfigError(
                f"--batch {batch} sequences of {context} tokens never decode all at once here; "
                "lower --batch or --context, or raise --kv-cache-memory-bytes"
            )
        # The first prompts decode while the last are computed: such steps are mixed.
        cut = clock.cut(loop)
        sequences = cut.step.sequences
        if len(sequences) == batch and all(s.num_tokens == 1 and s.samples for s in sequences):
            found.append([cut])
            advance()
    loop.abort_all()
    return found[_NUM_WARM_UPS:]


def _prefill_steps(
    loop: EngineLoop,
    clock: _Clock,
    requests: _Requests,
    prompt: int,
    advance: Callable[[], None],
) -> list[list[_Cut]]:
    """For each of several prompts, the steps up to its first token."""
    found: list[list[_Cut]] = []
    for _ in range(_NUM_WARM_UPS + _NUM_PREFILLS):
        loop.add(requests.take(prompt, 1))
        cuts = []
        while loop.has_work:
            cuts.append(clock.cut(loop))
        found.append(cuts)
        advance()
    return found[_NUM_WARM_UPS:]


def _step_profile(name: str, found: list[list[_Cut]], limits: Limits) -> StepProfile:
    found.sort(key=lambda cuts: sum(cut.end - cut.start for cut in cuts))
    faster = found[: max(1, len(found) // 2)]
    sums: dict[tuple[str, str], np.ndarray] = {}
    for kind, part, piece in (one for cuts in faster for cut in cuts for one in _pieces(cut)):
        values = np.array([1.0, piece.nanoseconds * 1e-9, piece.bytes, piece.operations])
        sums[kind, part] = sums.get((kind, part), 0.0) + values / len(faster)
    parts = []
    for (kind, part), (count, seconds, num_bytes, operations) in sums.items():
        least = None
        if kind in (PRODUCT, ATTENTION):
            peak = _peak(part, num_bytes / count, limits)
            least = limits.least_seconds(num_bytes, operations, peak)
        parts.append(Part(kind, part, count, seconds, num_bytes, operations, least))
    order = (PRODUCT, ATTENTION, UNDIVIDED, ROWS, EXCHANGE, SAMPLING, PYTHON)
    parts.sort(key=lambda part: (order.index(part.kind), -part.seconds))
    cuts = faster[-1]
    return StepProfile(
        name=name,
        num_sequences=max(len(cut.step.sequences) for cut in cuts),
        num_tokens=sum(cut.step.num_tokens for cut in cuts),
        context=max(s.start + s.num_tokens for cut in cuts for s in cut.step.sequences),
        num_measured=len(found),
        parts=parts,
        read_bytes_per_second=limits.read_bytes_per_second,
    )


def _pieces(cut: _Cut) -> Iterator[tuple[str, str, RegionTime]]:
    """All of a step, without gaps: (kind, name, what it took)."""
    yield PYTHON, "schedule", _between(cut.start, cut.submitted)
    before = cut.submitted
    for call in cut.calls:
        yield PYTHON, "lay out the batch", _between(before, call.start)
        for region in call.regions:
            yield _kind(region.name), region.name, region
        if call.regions:
            in_regions = sum(region.nanoseconds for region in call.regions) * 1e-9
            yield PYTHON, "call the tape", _between(call.start, call.end - in_regions)
        else:
            yield UNDIVIDED, "forward, head", _between(call.start, call.end)
        before = call.end
    samples = any(sequence.samples for sequence in cut.step.sequences)
    kind, name = (SAMPLING, "sample") if samples else (PYTHON, "lay out the batch")
    yield kind, name, _between(before, cut.returned)
    yield PYTHON, "update", _between(cut.returned, cut.end)


def _between(start: float, end: float) -> RegionTime:
    return RegionTime("", (end - start) * 1e9, 0.0, 0.0)


def _kind(region: str) -> str:
    if region.startswith("linear"):
        return PRODUCT
    if region.startswith(("all_reduce", "all_gather")):
        return EXCHANGE
    return ATTENTION if region.startswith("attention") else ROWS


def _peak(name: str, num_bytes: float, limits: Limits) -> float:
    """Operations per second at most: of 8-bit products for weights of about a byte or less."""
    shape = re.search(r"(\d+)x(\d+)", name)
    if shape is not None and num_bytes < 2 * int(shape[1]) * int(shape[2]):
        return max(limits.int8_operations_per_second.values())
    return max(limits.float_operations_per_second.values())
