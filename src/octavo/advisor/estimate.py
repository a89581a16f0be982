"""What a deployment will do under a load: simulated once, extended in closed form, with the
interval in which the truth may lie.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from octavo.advisor.layout import Layout, Settings
from octavo.advisor.memory import Memory, account
from octavo.advisor.model import PlannedModel
from octavo.advisor.promise import Limit, Promise
from octavo.advisor.queueing import LaneResult, Load, StepTimes, lane
from octavo.advisor.simulated import Outcome, most_users, run
from octavo.advisor.traffic import Traffic
from octavo.core.model_spec import KVFormat
from octavo.simulator.cost_model import CostModel, Provenance
from octavo.simulator.hardware import Hardware
from octavo.simulator.roofline import Deployment, Roofline

CostSource = Callable[[PlannedModel, Hardware, Layout, KVFormat], CostModel | None]
"""What steps cost, where that is known better than by specification."""

NUM_DRAWS = 60
_LOW, _HIGH = 0.05, 0.95
_LEAST_RATIO, _MOST_RATIO = 0.05, 20.0
"""Of a simulated value to that in closed form: beyond this the two don't speak of the same."""
_PRECISION = 0.02
_BUSIEST = 0.97
"""Of the most requests, in a busy period of the closed form."""
_RATE = ("rate", 0.0)
_MOST_FACTOR = 4096.0

METRICS: Mapping[str, tuple[str, float]] = {
    "ttft_p50": ("ttft", 0.5),
    "ttft_p99": ("ttft", 0.99),
    "tpot_p50": ("tpot", 0.5),
    "tpot_p99": ("tpot", 0.99),
    "e2e_p50": ("e2e", 0.5),
    "e2e_p99": ("e2e", 0.99),
}


@dataclass(frozen=True, slots=True)
class Range:
    """low to high: where 90 of 100 draws of what isn't known lie."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def at_least(self, other: Range) -> Range:
        """A higher percentile of the same quantity."""
        return Range(
            max(self.value, other.value), max(self.low, other.low), max(self.high, other.high)
        )

    def to_json(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 4) for name in ("value", "low", "high")}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of all replicas together at a load. times_ms: by name, see METRICS, and of the SLO's own
    percentiles. chance: share of draws in which the whole SLO is kept; None without one. load:
    share of what the replicas could do at most. method: how it was found. costs: where those of
    steps are from. provenance: of all numbers here.
    """

    times_ms: Mapping[str, Range]
    limits_ms: Mapping[Limit, Range]
    output_rate: Range
    request_rate: Range
    load: float
    prefill_share: float
    batch: float
    is_stable: bool
    chance: float | None
    num_simulated: int
    preemptions: int
    method: str
    costs: Provenance
    provenance: Provenance

    @property
    def meets(self) -> bool:
        return self.is_stable and all(
            found.value <= limit.limit_ms for limit, found in self.limits_ms.items()
        )


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A model on hardware in a layout, with settings, under traffic. costs: better ones than the
    roofline of the hardware's specification. corrections: simulated value over that in closed form.
    """

    model: PlannedModel
    hardware: Hardware
    layout: Layout
    settings: Settings
    traffic: Traffic
    costs: CostSource | None = None
    corrections: Mapping[tuple[str, float], float] = field(default_factory=dict)

    @cached_property
    def cost(self) -> CostModel:
        if self.costs is not None:
            found = self.costs(self.model, self.hardware, self.layout, self.settings.kv)
            if found is not None:
                return found
        deployment = Deployment(
            tensor_parallel=self.layout.tp,
            pipeline_parallel=self.layout.pp,
            matrices=self.model.matrices,
            rest=self.model.rest,
            kv=self.settings.kv,
        )
        return Roofline(self.model.spec, self.hardware, deployment)

    @cached_property
    def memory(self) -> Memory:
        return account(self.model, self.hardware, self.layout, self.settings, self.traffic.lengths)

    @cached_property
    def steps(self) -> StepTimes:
        return self.steps_of(self.cost)

    @property
    def provenance(self) -> Provenance:
        """Of what is predicted. What engines usually reach of a specification is a prior."""
        costs = self.cost.provenance
        return "prior" if costs == "specification" else costs

    @property
    def lanes(self) -> int:
        """Batches that are computed at once: one a replica, or one a stage of each."""
        return self.layout.replicas * self.layout.pp

    @property
    def most_running(self) -> float:
        """Sequences of one lane."""
        return max(1.0, min(self.settings.num_seqs, self.memory.users_mean) / self.layout.pp)

    @cached_property
    def load(self) -> Load:
        """All of it."""
        traffic = self.traffic
        return Load(traffic.users, traffic.rate, traffic.burst_cv)

    def lane_at(self, load: Load, steps: StepTimes | None = None) -> LaneResult:
        """In closed form. load: of all replicas."""
        each = load.times(1 / self.lanes)
        if each.users is not None and each.users < 1:
            each = Load(users=1.0)  # one request is in one lane; the others stand idle
        found = self._lane(each, steps)
        if each.rate is None or self.traffic.busy_factor == 1 or not found.is_stable:
            return found
        # Most requests come in busy periods: latency is that of their rate, as far as it can be
        # done; what is too much then is worked off in the quiet ones.
        busy = min(self.traffic.busy_factor, _BUSIEST / found.load)
        if busy <= 1:
            return found
        then = self._lane(replace(each, rate=each.rate * busy), steps)
        return replace(
            then,
            request_rate=found.request_rate,
            output_rate=found.output_rate,
            load=found.load,
            prefill_share=found.prefill_share,
            is_stable=True,
        )

    def _lane(self, each: Load, steps: StepTimes | None) -> LaneResult:
        return lane(
            steps or self.steps,
            self.traffic.lengths,
            each,
            budget=self.settings.token_budget,
            most_running=self.most_running,
        )

    @property
    def rate_correction(self) -> float:
        return self.corrections.get(_RATE, 1.0)

    def quantile_ms(self, found: LaneResult, metric: str, q: float) -> float:
        """Corrected."""
        value = 1e3 * found.quantile(metric, q, self.traffic.lengths.output_mean)
        return value * self.corrections.get((metric, q), 1.0)

    # --- prediction -----------------------------------------------------------------------------

    def predict(
        self, promise: Promise | None, case: Deployed, outcome: Outcome | None
    ) -> Prediction:
        """At the traffic's own load. case, outcome: this, corrected, as `simulated` gives them."""
        wanted = dict(METRICS)
        limits = () if promise is None else promise.limits
        wanted |= {str(limit): (limit.metric, limit.q) for limit in limits}
        centre = self.lane_at(self.load)
        spread = list(self._draws())
        times = {
            name: case._range(centre, spread, outcome, metric, q)
            for name, (metric, q) in wanted.items()
        }
        for metric in ("ttft", "tpot", "e2e"):
            times[f"{metric}_p99"] = times[f"{metric}_p99"].at_least(times[f"{metric}_p50"])
        rates = [found.request_rate for found in spread]
        base = centre.request_rate * self.lanes
        if self.load.users is not None and self.load.users < self.lanes:
            base = centre.request_rate * self.load.users
        request_rate = _ranged(
            base * case.rate_correction, [r / centre.request_rate for r in rates]
        )
        if self.load.rate is not None and centre.is_stable:
            request_rate = Range(self.load.rate, self.load.rate, self.load.rate)
        kept = [self._keeps(found, case, limits) for found in spread]
        return Prediction(
            times_ms={name: times[name] for name in METRICS},
            limits_ms={limit: times[str(limit)] for limit in limits},
            output_rate=request_rate.times(self.traffic.lengths.output_mean),
            request_rate=request_rate,
            load=centre.load,
            prefill_share=centre.prefill_share,
            batch=centre.batch * self.layout.pp,
            is_stable=centre.is_stable,
            chance=None if promise is None else sum(kept) / len(kept),
            num_simulated=0 if outcome is None else outcome.num_requests,
            preemptions=0 if outcome is None else outcome.preemptions,
            method=self._method(outcome),
            costs=self.cost.provenance,
            provenance=self.provenance,
        )

    def simulated(self, wanted: tuple[tuple[str, float], ...]) -> tuple[Deployed, Outcome | None]:
        """This, corrected by a simulation of one replica at its load, or at the part of it that
        ends in time; what can't be simulated (more comes than can be done) stays as it is.
        """
        each = self.load.times(1 / self.layout.replicas)
        if each.users is not None and each.users < 1:
            each = Load(users=1.0)
        share = min(1.0, most_users(self.traffic) / max(1.0, self._in_flight(each)))
        each = each.times(share)
        found = self.lane_at(each.times(self.layout.replicas))
        if not found.is_stable or not self.memory.fits:
            return self, None
        lifetime = found.quantile("e2e", 0.5, self.traffic.lengths.output_mean)
        outcome = run(
            self.cost,
            self.traffic,
            each,
            self.settings,
            num_blocks=self._blocks,
            in_flight=self._in_flight(each),
            lifetime_s=lifetime,
        )
        corrections = {}
        for metric, q in wanted:
            closed = found.quantile(metric, q, self.traffic.lengths.output_mean)
            corrections[metric, q] = _ratio(outcome.quantile(metric, q), closed)
        lanes = 1 if each.users is not None and each.users < self.layout.pp else self.layout.pp
        corrections[_RATE] = _ratio(outcome.request_rate, found.request_rate * lanes)
        return self.but(corrections=corrections), outcome

    def but(self, **changes: object) -> Deployed:
        names = ("model", "hardware", "layout", "settings", "traffic", "costs", "corrections")
        values = {name: getattr(self, name) for name in names}
        return Deployed(**{**values, **changes})

    # --- capacity -------------------------------------------------------------------------------

    def capacity(self, promise: Promise | None) -> float:
        """The most users, or requests a second, of all replicas within the SLO and without a queue
        that grows; 0 if not even one user, or a hundredth of the most requests, is served so.
        """
        is_closed = self.load.users is not None
        unit = Load(users=1.0) if is_closed else Load(rate=self._most_rate() / 100)
        unit = Load(unit.users, unit.rate, self.load.burst_cv)
        if not self.memory.fits or not self._is_kept(unit, promise):
            return 0.0
        low, high = 1.0, 2.0
        while high < _MOST_FACTOR and self._is_kept(unit.times(high), promise):
            low, high = high, 2 * high
        while high / low > 1 + _PRECISION:
            middle = (low * high) ** 0.5
            if self._is_kept(unit.times(middle), promise):
                low = middle
            else:
                high = middle
        found = unit.times(low)
        return float(int(found.users)) if found.users is not None else found.rate or 0.0

    def _is_kept(self, load: Load, promise: Promise | None) -> bool:
        found = self.lane_at(load)
        if not found.is_stable:
            return False
        limits = () if promise is None else promise.limits
        if not any(limit.metric in ("ttft", "e2e") for limit in limits) and found.queue_s > 0.01:
            return False  # who waits is not served, if nothing else limits it
        return all(
            self.quantile_ms(found, limit.metric, limit.q) <= limit.limit_ms for limit in limits
        )

    def _most_rate(self) -> float:
        """Requests a second that all replicas could do, whatever the latency."""
        found = self.lane_at(Load(users=4 * self.most_running * self.lanes))
        return found.request_rate * self.lanes

    # --- parts ----------------------------------------------------------------------------------

    def steps_of(self, cost: CostModel) -> StepTimes:
        """Under another cost model."""
        hits = self.traffic.hit_rate if self.settings.prefix_caching else 0.0
        return StepTimes(cost, self.traffic.lengths, hits)

    @property
    def _blocks(self) -> int:
        """For the simulated scheduler, which keeps all blocks of window layers: as many as hold the
        sequences that an engine holds which frees them.
        """
        each = math.ceil(self.traffic.lengths.context / self.settings.block_size)
        users = min(self.memory.users_mean, 1e6)
        return max(self.memory.num_blocks, int(users * each))

    def _in_flight(self, each: Load) -> float:
        """Requests of a replica under a load of it."""
        if each.users is not None:
            return each.users
        found = self.lane_at(each.times(self.layout.replicas))
        seconds = found.quantile("e2e", 0.5, self.traffic.lengths.output_mean)
        return (each.rate or 0.0) * seconds

    def _draws(self) -> Iterator[LaneResult]:
        """At the load, if the cost model were another one that may be true."""
        rng = random.Random(0)
        for _ in range(NUM_DRAWS):
            yield self.lane_at(self.load, self.steps_of(self.cost.draw(rng)))

    def _range(
        self,
        centre: LaneResult,
        spread: list[LaneResult],
        outcome: Outcome | None,
        metric: str,
        q: float,
    ) -> Range:
        """Of what costs may be, and of how few requests the simulation had: both as factors, whose
        logarithms' squares add up.
        """
        output = self.traffic.lengths.output_mean
        base = centre.quantile(metric, q, output)
        found = _ranged(
            self.quantile_ms(centre, metric, q),
            [one.quantile(metric, q, output) / base for one in spread],
        )
        if outcome is None or (middle := outcome.quantile(metric, q)) <= 0:
            return found
        low, high = outcome.interval(metric, q)
        return Range(
            found.value,
            found.value / _together(found.value / found.low, middle / max(low, 1e-9)),
            found.value * _together(found.high / found.value, high / middle),
        )

    def _keeps(self, found: LaneResult, case: Deployed, limits: tuple[Limit, ...]) -> bool:
        return found.is_stable and all(
            case.quantile_ms(found, limit.metric, limit.q) <= limit.limit_ms for limit in limits
        )

    def _method(self, outcome: Outcome | None) -> str:
        if outcome is None:
            return "closed form"
        each = self._in_flight(self.load.times(1 / self.layout.replicas))
        if each > most_users(self.traffic):
            return (
                f"{outcome.num_requests} requests of one replica simulated at "
                f"{most_users(self.traffic)} in flight, closed form beyond"
            )
        return f"{outcome.num_requests} requests of one replica simulated"


def _ratio(simulated_value: float, closed: float) -> float:
    if simulated_value <= 0 or closed <= 0:
        return 1.0
    return min(_MOST_RATIO, max(_LEAST_RATIO, simulated_value / closed))


def _ranged(value: float, ratios: list[float]) -> Range:
    ordered = sorted(ratios)
    low = ordered[int(_LOW * (len(ordered) - 1))]
    high = ordered[int(_HIGH * (len(ordered) - 1)) + 1 if len(ordered) > 1 else 0]
    return Range(value, value * min(1.0, low), value * max(1.0, high))


def _together(one: float, other: float) -> float:
    return math.exp(math.hypot(math.log(max(1.0, one)), math.log(max(1.0, other))))
