"""Learning what steps cost from a recording (`octavo serve --record-steps`).

Least squares on shares: a step that is off by a tenth counts alike, be it short or long. Factors
can't be negative (more work takes no less time), so what the recording can't tell apart is shared
or left at nothing instead of cancelling out. Steps that something interrupted have less weight, and
at the end all factors are multiplied so that the recording's whole time comes out right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, ModelSpec
from octavo.core.step import StepOutput
from octavo.engine.messages import Add, End, ForgetPrefixes
from octavo.engine.recording import ExecutorLost, RecordedStep, Recording, StepFailed
from octavo.scheduler.scheduler import Scheduler
from octavo.simulator.fitted import FittedCost, StepTerms, draft_terms
from octavo.simulator.work import StepWork, work_of

Floats = NDArray[np.float64]

_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_LEAST_BEYOND = 12
"""Steps with more rows than a knot has, for it to be one."""
_LEAST_STEPS = 100
_ROUNDS = 6
_FEWEST_BLOCKS, _BLOCK_STEPS = 10, 50
_ALTERNATIVES = 64
_RATIOS = 201
_DRIFT_PARTS, _LEAST_DRIFT = 20, 0.02
_OUTLIER = 3.0
"""Times the usual deviation: from there on a step has less weight."""


class ObservedStep(NamedTuple):
    """seconds: from when it was planned until the next one could be, guessing apart."""

    work: StepWork
    seconds: float
    draft_seconds: float


def observed_steps(recording: Recording, windows: Sequence[int | None]) -> list[ObservedStep]:
    """All steps that came to an end. windows: of the model. Raises ConfigError if the recording is
    damaged.

    What the engine does between steps belongs to them: a virtual clock doesn't move while a
    scheduler decides. Where it waited for requests, the mean of the others is taken.
    """
    steps: list[tuple[StepWork, float, float, float | None]] = []
    for work, start, output, end, next_start in _timed_steps(recording, windows):
        drafting = sum(output.draft_seconds) + sum(output.catch_up_seconds)
        between = None if next_start is None else next_start - end
        steps.append((work, end - start - drafting, drafting, between))
    known = [between for *_, between in steps if between is not None]
    usual = sum(known) / len(known) if known else 0.0
    return [
        ObservedStep(work, seconds + (usual if between is None else between), drafting)
        for work, seconds, drafting, between in steps
    ]


class FirstToken(NamedTuple):
    """Of a request, on the engine's clock: when it came, and when its first token did."""

    arrival_s: float
    first_token_s: float


def first_tokens(recording: Recording) -> list[FirstToken]:
    """Of each request that got a token."""
    scheduler = recording.settings.build()
    waiting: dict[str, float] = {}
    found = []
    for at, what, is_refused in recording.events():
        match what:
            case Add(request) if not is_refused:
                scheduler.add(request)
                waiting[request.request_id] = at
            case RecordedStep():
                scheduler.schedule(at)
            case StepOutput() as output:
                found += [
                    FirstToken(waiting.pop(delta.request_id), at)
                    for delta in scheduler.update(output, at)
                    if delta.token_ids and delta.request_id in waiting
                ]
            case _:
                _tell(scheduler, at, what)
    return found


def fit(steps: Sequence[ObservedStep], spec: ModelSpec, kv_format: KVFormat) -> FittedCost:
    """spec, kv_format: of the model whose steps they are; its windows are those of the steps.

    Raises ConfigError if the steps are too few to learn from.
    """
    if len(steps) < _LEAST_STEPS:
        raise ConfigError(
            f"the recording has {len(steps)} steps, and {_LEAST_STEPS} are needed to learn what "
            "they cost; record a longer run"
        )
    terms = StepTerms(_knots([step.work.num_tokens for step in steps]), _shares(spec, kv_format))
    table = np.array([terms.of(step.work) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    factors, weights = _robust(table, seconds)
    expected = table @ factors
    blocks = np.array_split(np.arange(len(steps)), max(_FEWEST_BLOCKS, len(steps) // _BLOCK_STEPS))
    return FittedCost(
        windows=spec.windows,
        terms=terms,
        factors=tuple(factors.tolist()),
        alternatives=_alternatives(table, seconds, weights, blocks),
        drift=_drift(seconds, expected),
        ratios=_ratios(seconds, expected),
        draft_factors=_draft_factors(steps),
        num_steps=len(steps),
        mean_error=_held_out_error(table, seconds, blocks),
    )


# --- recordings -----------------------------------------------------------------------------------


def _timed_steps(
    recording: Recording, windows: Sequence[int | None]
) -> Iterator[tuple[StepWork, float, StepOutput, float, float | None]]:
    """Work, start, output, end, and the start of the next step if the engine had no pause before.

    A scheduler that is told the same plans the same steps (see replay.py), with all that is not in
    the file: what is new, and whether anything is left to do.
    """
    scheduler = recording.settings.build()
    pending: tuple[StepWork, float, StepOutput, float] | None = None
    step, start, is_busy = None, 0.0, False
    for at, what, is_refused in recording.events():
        match what:
            case Add(request) if not is_refused:
                scheduler.add(request)
            case RecordedStep(_, recorded):
                if pending is not None:
                    yield *pending, at if is_busy else None
                step, start, pending = scheduler.schedule(at), at, None
                if step is None or step.sequences != recorded.sequences:
                    raise ConfigError(
                        f"{recording.path}: step {recorded.step_id} is decided otherwise now, so "
                        "what was in it is not known; record steps with this version"
                    )
            case StepOutput() as output if step is not None:
                lengths = [result.num_drafts for result in output.sequences]
                pending = work_of(step, windows, lengths), start, output, at
                scheduler.update(output, at)
                is_busy = scheduler.has_unfinished
            case _:
                _tell(scheduler, at, what)
    if pending is not None:
        yield *pending, None


def _tell(scheduler: Scheduler, at: float, what: object) -> None:
    """What happens now and then."""
    match what:
        case End(request_id, which, reason):
            scheduler.end(request_id, which, reason, at)
        case ForgetPrefixes():
            scheduler.forget_prefixes()
        case StepFailed(error):
            scheduler.fail(error, at, running_only=True)
        case ExecutorLost():
            scheduler.start_over()


# --- regression -----------------------------------------------------------------------------------


def _knots(rows: Sequence[int]) -> tuple[int, ...]:
    """Those that enough steps lie beyond: the last one's cost goes on for ever."""
    largest = sorted(rows)[-_LEAST_BEYOND]
    return tuple(knot for knot in _KNOTS if knot == 0 or knot < largest)


def _shares(spec: ModelSpec, kv_format: KVFormat) -> tuple[float, ...]:
    total = spec.kv_bytes_per_token(kv_format) or 1
    sizes = dict.fromkeys(spec.windows, 0)
    for layer in spec.layers:
        if layer.attention is not None:
            sizes[layer.attention.window] += layer.attention.kv_bytes_per_token(kv_format)
    return tuple(size / total for size in sizes.values())


def _robust(table: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Factors, and the weights of steps that they come from."""
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        factors = _factors(table, seconds, weights)
        ratios = seconds / np.maximum(table @ factors, 1e-12)
        deviation = np.abs(ratios - np.median(ratios))
        usual = max(1.4826 * float(np.median(deviation)), 1e-6)
        weights = np.minimum(1.0, _OUTLIER * usual / np.maximum(deviation, 1e-12))
    return factors * (seconds.sum() / (table @ factors).sum()), weights


def _factors(table: Floats, seconds: Floats, weights: Floats) -> Floats:
    relative = table / seconds[:, None] * np.sqrt(weights)[:, None]
    return non_negative(relative.T @ relative, relative.T @ np.sqrt(weights))


def non_negative(matrix: Floats, vector: Floats) -> Floats:
    """The x >= 0 that minimizes x' matrix x / 2 - vector' x: an active-set method (Lawson and
    Hanson 1974, Solving Least Squares Problems). matrix (N, N), positive semidefinite; vector (N,).
    """
    scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    a, b = matrix / np.outer(scale, scale), vector / scale
    count = len(b)
    x, is_free = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        slope = np.where(is_free, -np.inf, b - a @ x)
        if slope.max() <= 1e-9:
            break
        is_free[int(slope.argmax())] = True
        while True:
            free = np.flatnonzero(is_free)
            best = np.zeros(count)
            best[free] = np.linalg.lstsq(a[np.ix_(free, free)], b[free], rcond=1e-12)[0]
            below = free[best[free] <= 0]
            if len(below) == 0:
                x = best
                break
            step = float((x[below] / np.maximum(x[below] - best[below], 1e-300)).min())
            x = x + step * (best - x)
            is_free &= x > 1e-14
            x[~is_free] = 0.0
    return x / scale


def _alternatives(
    table: Floats, seconds: Floats, weights: Floats, blocks: Sequence[NDArray[np.int64]]
) -> tuple[tuple[float, ...], ...]:
    """A bootstrap of blocks: steps that follow one another are alike."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_ALTERNATIVES):
        chosen = np.concatenate([blocks[i] for i in rng.integers(len(blocks), size=len(blocks))])
        factors = _factors(table[chosen], seconds[chosen], weights[chosen])
        total = (table[chosen] @ factors).sum()
        found.append(tuple((factors * (seconds[chosen].sum() / total)).tolist()))
    return tuple(found)


def _drift(seconds: Floats, expected: Floats) -> float:
    """By parts of the recording that are long enough for chance to even out."""
    parts = zip(
        np.array_split(seconds, _DRIFT_PARTS), np.array_split(expected, _DRIFT_PARTS), strict=True
    )
    logs = [np.log(part.sum() / wanted.sum()) for part, wanted in parts]
    return max(_LEAST_DRIFT, float(np.std(logs, ddof=1)))


def _ratios(seconds: Floats, expected: Floats) -> tuple[float, ...]:
    """Of the middles of equal parts, so that each is as likely; scaled to a mean of 1."""
    shares = (np.arange(_RATIOS) + 0.5) / _RATIOS
    ratios = np.quantile(seconds / expected, shares)
    return tuple((ratios / ratios.mean()).tolist())


def _held_out_error(
    table: Floats, seconds: Floats, blocks: Sequence[NDArray[np.int64]], folds: int = 5
) -> float:
    """Mean of |expected / measured - 1|, each fifth of the blocks by the others."""
    errors = []
    for fold in range(folds):
        held = np.concatenate(blocks[fold::folds])
        rest = np.setdiff1d(np.arange(len(seconds)), held)
        factors, _ = _robust(table[rest], seconds[rest])
        errors.append(np.abs(table[held] @ factors / seconds[held] - 1))
    return float(np.concatenate(errors).mean())


def _draft_factors(steps: Sequence[ObservedStep]) -> tuple[float, ...]:
    """Absolute errors here: to guess may take next to no time."""
    drafting = [step for step in steps if step.work.num_drafting]
    if not drafting:
        return (0.0, 0.0, 0.0)
    table = np.array([draft_terms(step.work) for step in drafting])
    seconds = np.array([step.draft_seconds for step in drafting])
    return tuple(non_negative(table.T @ table, table.T @ seconds).tolist())
