"""Latency and throughput in closed form: fast enough to compare hundreds of cases.

One lane is what one scheduler sees: a replica, or of a pipeline with P stages one of the P batches
that are in flight. Its steps are of two kinds, with tokens of prompts (t1 seconds) and without
(t0). A request takes n of those with: several for the pieces of a long prompt, part of one where
short prompts come together. At x requests a second a share x n t1 of the time goes to them, and
between two tokens of an answer passes

    tpot = t0 / (1 - x n (t1 - t0)),        batch = x E[output] tpot   (Little's law)

which is solved by iteration, since t0 and t1 depend on the batch. Averaging over a mean step
instead hides that prompts cross the roofline's ridge where single tokens don't. Waiting for the
first token is that of an M/G/1 queue of prompts. docs/plan.md compares it with simulations: so a
plan's answer is simulated, and this is used for ratios: between loads, between cost models that may
be true.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from octavo.advisor.traffic import Lengths
from octavo.simulator.cost_model import CostModel
from octavo.simulator.work import AttentionWork, StepWork

_NORMAL = NormalDist()
_ROUNDS = 12
_BISECTIONS = 30
_SATURATED = 0.995


class StepTimes:
    """Seconds of typical steps under a cost model. known: tokens of a prompt that a cache has."""

    def __init__(self, cost: CostModel, lengths: Lengths, hit_rate: float) -> None:
        self._seconds = cost.seconds
        self._windows = cost.windows
        self._context = lengths.context
        self._known = lengths.input_mean * hit_rate
        self.prompt = max(1.0, lengths.input_mean - self._known)
        """Tokens of a prompt that are computed."""
        self._decoding = lru_cache(maxsize=None)(self._of)

    def decoding(self, batch: float) -> float:
        """So many sequences, each with one new token."""
        return self._interpolated(batch, 0)

    def mixed(self, batch: float, chunk: float) -> float:
        """Besides, so many tokens of prompts: a piece of one, or several prompts."""
        return self._interpolated(batch, max(1, round(chunk)))

    def verifying(self, batch: int, guesses: int) -> float:
        """Each sequence has so many guessed tokens as well."""
        rows = batch * (guesses + 1)
        context = round(self._context)
        attention = tuple(
            AttentionWork(
                window,
                0,
                batch * _seen(context + guesses, window),
                rows * _seen(context, window),
                batch * _seen(context, window),
            )
            for window in self._windows
        )
        return self._seconds(
            StepWork(rows, rows, batch, batch, batch * guesses, guesses, 0, attention)
        )

    def _interpolated(self, batch: float, chunk: int) -> float:
        """Between whole batches, so that iterations converge."""
        low = int(batch)
        share = batch - low
        seconds = self._decoding(low, chunk)
        return (
            seconds if not share else seconds + share * (self._decoding(low + 1, chunk) - seconds)
        )

    def _of(self, batch: int, chunk: int) -> float:
        context = round(self._context)
        prompts = max(1, round(chunk / self.prompt)) if chunk else 0
        each = chunk // max(1, prompts)
        # The middle piece of the prompt stands for all.
        before = round(self._known + max(0.0, (self.prompt - each) / 2)) if chunk else 0
        attention = tuple(
            AttentionWork(
                window,
                batch * _seen(context, window),
                prompts * _seen(before + each, window),
                prompts * _pairs(before, each, window),
                prompts * _seen(before, window),
            )
            for window in self._windows
        )
        sequences = batch + prompts
        return self._seconds(
            StepWork(max(1, batch + chunk), sequences, max(1, sequences), 0, 0, 0, 0, attention)
        )


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(before: int, chunk: int, window: int | None) -> int:
    if window is None or before + chunk <= window:
        return chunk * before + chunk * (chunk + 1) // 2
    return chunk * min(window, before + chunk // 2)


@dataclass(frozen=True, slots=True)
class Load:
    """Of one lane: users of a closed loop, or requests a second. burst_cv: of gaps."""

    users: float | None = None
    rate: float | None = None
    burst_cv: float = 1.0

    def times(self, factor: float) -> Load:
        if self.rate is not None:
            return replace(self, rate=self.rate * factor)
        return replace(self, users=(self.users or 0.0) * factor)


@dataclass(frozen=True, slots=True)
class LaneResult:
    """In seconds and per second. ttft: mean wait and own time; the wait's tail is exponential with
    mean wait_scale where there is one (probability wait_share). tpot, tpot_sd: over requests. load:
    share of the most requests that the lane could do. prefill_share: of time, what
    prompts add to steps. batch: decoding.
    is_stable: False where more comes than can be done; then the others are what the lane tends to.
    """

    own_prefill: float
    longest_prefill: float
    first_step: float
    wait_share: float
    wait_scale: float
    tpot: float
    tpot_sd: float
    batch: float
    request_rate: float
    output_rate: float
    load: float
    prefill_share: float
    queue_s: float
    is_stable: bool

    def quantile(self, metric: str, q: float, output_mean: float) -> float:
        """Seconds below which a share q of requests lies; ttft, tpot or e2e."""
        if metric == "tpot":
            return max(0.0, self.tpot + _NORMAL.inv_cdf(q) * self.tpot_sd)
        if metric == "ttft":
            return self._ttft(q)
        return self._ttft(q) + max(0.0, output_mean - 1) * self.tpot

    def _ttft(self, q: float) -> float:
        wait = 0.0
        if self.wait_share > 1 - q and self.wait_scale > 0:
            wait = self.wait_scale * math.log(self.wait_share / (1 - q))
        own = self.own_prefill if q <= 0.5 else max(
            self.own_prefill, self.longest_prefill * (q - 0.5) / 0.5
        )  # fmt: skip
        mean_wait = self.wait_share * self.wait_scale
        with_wait = max(self.own_prefill + wait, own + min(mean_wait, wait or mean_wait))
        return self.queue_s + self.first_step + with_wait


def lane(
    steps: StepTimes, lengths: Lengths, load: Load, *, budget: int, most_running: float
) -> LaneResult:
    """most_running: sequences that may run at once: max_num_seqs, or what KV holds."""
    batch = min(load.users or 1.0, most_running)
    rate = load.rate or 0.0
    queue = 0.0
    is_stable = True
    chunk = 0.0
    for _ in range(_ROUNDS):
        room = max(1.0, budget - batch)
        # What comes while a step with prompts runs is in the next one: as much as there is room.
        fewest = min(steps.prompt, room)
        chunk = min(room, max(fewest, chunk))
        plain, mixed = steps.decoding(batch), steps.mixed(batch, chunk)
        full = mixed if chunk == room else steps.mixed(batch, room)
        kind = _Kind(
            plain,
            mixed,
            steps.prompt / chunk,
            max(1.0, steps.prompt / room) * mixed,
            steps.prompt / room * full,
            lengths.output_mean,
        )
        most = kind.most_rate(most_running)
        if load.users is not None:
            rate = kind.rate_of_users(load.users, most)
            tpot = kind.tpot(rate)
            in_service = rate * (kind.first_token(rate, 1.0) + lengths.output_mean * tpot)
            queue = max(0.0, load.users - in_service) / rate
        else:
            is_stable = rate < _SATURATED * most
            tpot = kind.tpot(min(rate, _SATURATED * most))
        new = min(most_running, max(1e-6, min(rate, most) * lengths.output_mean * tpot))
        coming = min(room, max(fewest, min(rate, most) * mixed * steps.prompt))
        if abs(new - batch) < 1e-3 * batch and abs(coming - chunk) < 1e-2 * chunk:
            batch = new
            break
        batch, chunk = (batch + new) / 2, (chunk + coming) / 2
    served = min(rate, most)
    share = min(1.0, served * kind.num_mixed * mixed)
    busy = min(_SATURATED, served * kind.least_s)
    wait = kind.mean_wait(served, load.burst_cv if load.users is None else 1.0)
    if load.users is not None:
        wait = min(wait, (load.users - 1) / 2 * kind.least_s)
    jitter = min(share, 1 - share) * lengths.inverse_output
    spread = math.sqrt(max(0.0, jitter)) * (mixed - plain)
    if load.users is None:  # the batch itself comes and goes
        slope = (steps.decoding(batch + 1) - steps.decoding(batch)) * (tpot / plain)
        spread = math.hypot(spread, slope * math.sqrt(batch) * load.burst_cv)
    return LaneResult(
        own_prefill=kind.own_s,
        longest_prefill=max(1.0, lengths.input_p99 / lengths.input_mean) * kind.own_s,
        first_step=tpot / 2 if batch > 1 else 0.0,
        wait_share=busy,
        wait_scale=wait / busy if busy else 0.0,
        tpot=tpot,
        tpot_sd=spread,
        batch=batch,
        request_rate=served,
        output_rate=served * lengths.output_mean,
        load=rate / most if load.users is None else served / most,
        prefill_share=min(1.0, served * kind.num_mixed * (mixed - plain)),
        queue_s=queue,
        is_stable=is_stable,
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """Steps at one batch. plain, mixed: seconds of a step without and with tokens of prompts.
    num_mixed: steps with them that a request takes. own_s: seconds that it waits for its own
    prompt. least_s: seconds that a prompt takes of the lane when each step has all that it may.
    output: tokens of an answer.
    """

    plain: float
    mixed: float
    num_mixed: float
    own_s: float
    least_s: float
    output: float

    def tpot(self, rate: float) -> float:
        left = 1 - rate * self.num_mixed * (self.mixed - self.plain)
        return min(self.mixed, self.plain / left) if left > 0 else self.mixed

    def mean_wait(self, rate: float, burst_cv: float) -> float:
        """Of a prompt for those before it (Pollaczek and Khinchine, with Kingman's correction for
        gaps that aren't exponential).
        """
        busy = min(_SATURATED, rate * self.least_s)
        return busy * self.least_s / (2 * (1 - busy)) * (1 + burst_cv**2) / 2

    def first_token(self, rate: float, burst_cv: float) -> float:
        return self.tpot(rate) / 2 + self.mean_wait(rate, burst_cv) + self.own_s

    def most_rate(self, most_running: float) -> float:
        """Where prompts take all steps, or where so many sequences run."""
        by_prompts = 1 / self.least_s
        # rate output tpot(rate) = most_running, solved for the rate.
        per_token = most_running / self.output
        extra = self.num_mixed * (self.mixed - self.plain)
        by_batch = per_token / (self.plain + per_token * extra)
        return min(by_prompts, by_batch)

    def rate_of_users(self, users: float, most: float) -> float:
        """By Little's law, at most `most`."""
        low, high = 0.0, most
        for _ in range(_BISECTIONS):
            rate = (low + high) / 2
            if rate * (self.first_token(rate, 1.0) + self.output * self.tpot(rate)) < users:
                low = rate
            else:
                high = rate
        return max(low, 1e-9)
