"""How the plan is checked: `octavo bench` commands, and what each should show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from octavo.advisor.estimate import Deployed, Prediction, Range
from octavo.advisor.promise import Promise
from octavo.advisor.queueing import Load
from octavo.advisor.traffic import Traffic
from octavo.simulator.cost_model import Provenance

WORKLOAD_FILE = "workload.yaml"


@dataclass(frozen=True, slots=True)
class Rung:
    """Predicted at so many users: per second, and milliseconds."""

    users: int
    output_rate: float
    ttft_ms: float
    tpot_ms: float

    def to_json(self) -> dict[str, float]:
        return {
            "users": self.users,
            "output_rate": round(self.output_rate, 1),
            "ttft_p50_ms": round(self.ttft_ms, 1),
            "tpot_p50_ms": round(self.tpot_ms, 2),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """command: runs as it is. expected: in words, with values. reading: what it says if it comes
    out otherwise.
    """

    name: str
    command: str
    expected: str
    reading: str

    def to_json(self) -> dict[str, str]:
        names = ("name", "command", "expected", "reading")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class LoadTest:
    """ladder: what to expect at rising users, up to where output no longer rises. capacity: users
    within the SLO; rate_capacity: requests a second of an open loop, None if it isn't told.
    """

    steps: tuple[Step, ...]
    ladder: tuple[Rung, ...]
    most_output: float
    knee_users: float
    capacity_rate: float
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [step.to_json() for step in self.steps],
            "ladder": [rung.to_json() for rung in self.ladder],
            "x_max_output_rate": round(self.most_output, 1),
            "n_star_users": round(self.knee_users, 1),
            "slo_request_rate": round(self.capacity_rate, 3),
            "provenance": self.provenance,
        }


def load_test(
    deployed: Deployed, prediction: Prediction, promise: Promise | None, url: str
) -> LoadTest:
    """deployed: corrected by its simulation."""
    traffic = deployed.traffic
    ladder = _ladder(deployed)
    top = max(rung.output_rate for rung in ladder)
    alone = ladder[0]
    seconds_alone = (alone.ttft_ms + (traffic.lengths.output_mean - 1) * alone.tpot_ms) / 1e3
    knee = top / traffic.lengths.output_mean * seconds_alone
    rate = _rate_capacity(deployed, promise)
    asks = traffic.option or f"--workload {WORKLOAD_FILE}"
    slo = "" if promise is None else f" --slo '{promise.slo.text}'"
    users = ",".join(str(rung.users) for rung in ladder)
    steps = [
        Step(
            "one user: the floor",
            f"octavo bench serve {url} {asks} --concurrency 1 --seconds 60",
            f"TTFT p50 {_ms(alone.ttft_ms)}, TPOT p50 {_ms(alone.tpot_ms)}, both within 30 %",
            "slower: another dtype or a fallback kernel runs, clocks are capped, or graphs are off",
        ),
        Step(
            "ladder: where it saturates",
            f"octavo bench sweep {url} {asks} --concurrency {users} --seconds 60",
            f"output rises to about {_rate(top)} tokens/s; the knee N* at {knee:.0f} users",
            "flat early with KV usage above 0.9: memory bounds it; with KV free: compute does",
        ),
        _peak(url, asks, slo, traffic, prediction),
    ]
    if promise is not None and rate > 0:
        steps += [
            Step(
                "capacity: the rate that keeps the SLO",
                f"octavo bench sweep {url} {asks}{slo} --seconds 60 --budget 30m",
                f"about {_rate(rate)} requests/s, confirmed on three seeds",
                "a cliff instead of a slope: preemptions, or a queue without limit",
            ),
            Step(
                "bursts",
                f"octavo bench serve {url} {asks}{slo} --request-rate {_rate(0.8 * rate)} "
                "--burstiness 0.25 --seconds 300",
                "TTFT p99 rises, TPOT hardly",
                "TPOT rises as well: lower the token budget",
            ),
            Step(
                "soak",
                f"octavo bench serve {url} {asks}{slo} --request-rate {_rate(0.8 * rate)} "
                "--seconds 1800",
                "the last minutes like the first, no preemptions",
                "drift: a leak, heat, or prefix caches that fill",
            ),
            Step(
                "overload",
                f"octavo bench serve {url} {asks} --request-rate {_rate(1.5 * rate)} --seconds 120",
                "refusals (503) instead of ever longer TTFT, and normal latency a minute later",
                "no refusals: set the queue limit",
            ),
        ]
    return LoadTest(tuple(steps), tuple(ladder), top, knee, rate, deployed.provenance)


def _peak(url: str, asks: str, slo: str, traffic: Traffic, prediction: Prediction) -> Step:
    load = (
        f"--concurrency {traffic.users:g}"
        if traffic.users is not None
        else f"--request-rate {traffic.rate:g}"
    )
    if traffic.rate is not None and traffic.burstiness is not None:
        load += f" --burstiness {traffic.burstiness:g}"
    times = prediction.times_ms
    return Step(
        "the peak of this plan",
        f"octavo bench serve {url} {asks}{slo} {load} --seconds 180",
        f"TTFT p50/p99 {_range(times['ttft_p50'])} / {_range(times['ttft_p99'])}, TPOT p50/p99 "
        f"{_range(times['tpot_p50'])} / {_range(times['tpot_p99'])}, "
        f"{_rate(prediction.output_rate.value)} tokens/s",
        "outside the intervals: `octavo plan verify` says by how much, metric by metric",
    )


def _ladder(deployed: Deployed) -> list[Rung]:
    """Users doubled until output rises by less than 3 %, or memory is full."""
    rungs: list[Rung] = []
    users = 1
    plain = deployed.but(traffic=replace(deployed.traffic, users=1, rate=None))
    while users <= 4096:
        lane = plain.lane_at(Load(users=float(users)))
        lanes = min(users, plain.lanes)
        rung = Rung(
            users,
            lane.output_rate * lanes,
            _ttft_ms(deployed, plain, users),
            plain.quantile_ms(lane, "tpot", 0.5),
        )
        rungs.append(rung)
        if len(rungs) > 1 and rung.output_rate < 1.03 * rungs[-2].output_rate:
            break
        users *= 2
    return rungs


def _alone_ms(deployed: Deployed) -> float:
    """TTFT of the median prompt, with nobody else there."""
    traffic, budget = deployed.traffic, deployed.settings.token_budget
    prompt = max(1.0, traffic.lengths.input_p50 * (1 - traffic.hit_rate))
    pieces = math.ceil(prompt / budget)
    return 1e3 * pieces * deployed.steps.mixed(0, prompt / pieces)


def _ttft_ms(deployed: Deployed, closed: Deployed, users: int) -> float:
    """Of users in a closed loop. From the users of the plan on, the closed form times what their
    simulation corrected; below, where nearly all that it corrected is a wait, between one user
    alone and these.
    """

    def corrected(count: float) -> float:
        return closed.quantile_ms(closed.lane_at(Load(users=count)), "ttft", 0.5)

    peak, alone = deployed.load.users, _alone_ms(closed)
    if peak is None:  # requests at a rate: nothing is known of their closed loop
        return alone * corrected(users) / corrected(1)
    if users >= peak:
        return corrected(users)
    share = math.log(users) / math.log(peak)
    return float(alone ** (1 - share) * corrected(peak) ** share)


def _rate_capacity(deployed: Deployed, promise: Promise | None) -> float:
    """Of Poisson arrivals, in closed form with what the simulation corrected."""
    rate = deployed.traffic.rate
    traffic = replace(deployed.traffic, users=None, rate=rate or 1.0)
    return deployed.but(traffic=traffic).capacity(promise)


def _range(value: Range) -> str:
    return f"{_ms(value.value)} [{_digits(value.low)}, {_digits(value.high)}]"


def _ms(value: float) -> str:
    return f"{_digits(value)} ms"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _rate(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}".replace(",", "")
    digits = max(0, 2 - math.floor(math.log10(max(value, 1e-6))))
    return f"{value:.{min(digits, 4)}f}"
