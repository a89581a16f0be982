"""The layout and the settings of a plan: all that are possible are compared, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.advisor.case_facts import layout_facts
from octavo.advisor.estimate import CostSource, Deployed
from octavo.advisor.layout import Layout, Settings, layouts
from octavo.advisor.model import PlannedModel
from octavo.advisor.promise import Promise
from octavo.advisor.queueing import LaneResult, Load
from octavo.advisor.rules import REJECT, Finding, Kind, matching
from octavo.advisor.traffic import Traffic
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.simulator.hardware import Hardware

_GPU_BUDGETS, _CPU_BUDGETS = (256, 512, 1024, 2048, 4096, 8192), (128, 256, 512)
_GPU_BUDGET, _CPU_BUDGET = 2048, 512
"""Defaults: of vLLM for latency and of Octavo; another one must serve so much more."""
_WORTH = 1.05
_HEADROOM = 1.2
"""Capacity over load that is enough for a layout."""
_GPU_SHARE, _CPU_SHARE = 0.90, 0.50
_GPU_SEQS, _CPU_SEQS = 256, 128
_LENGTH_GRAIN = 256
_TEMPLATE_TOKENS = 64
"""What a chat template may add."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user fixed; None is left to the plan."""

    tp: int | None = None
    pp: int | None = None
    kv: KVFormat | None = None
    memory_share: float | None = None
    num_seqs: int | None = None
    token_budget: int | None = None
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that was looked at. findings: of layout rules. capacity: users, or requests
    per second, of all replicas within the SLO; output_rate: at the load; worst: largest share of a
    limit that is used at the load, 0 without limits.
    """

    deployed: Deployed
    findings: tuple[Finding, ...]
    capacity: float = 0.0
    output_rate: float = 0.0
    worst: float = 0.0

    @property
    def layout(self) -> Layout:
        return self.deployed.layout

    @property
    def is_rejected(self) -> bool:
        return any(finding.rule.effect == REJECT for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "tensor_parallel": self.layout.tp,
            "pipeline_parallel": self.layout.pp,
            "replicas": self.layout.replicas,
            "rejected": self.is_rejected,
            "capacity": round(self.capacity, 3),
            "output_rate": round(self.output_rate, 1),
            "worst_share_of_limit": round(self.worst, 3),
            "provenance": self.deployed.provenance,
            "findings": [finding.to_json() for finding in self.findings],
        }


def first_settings(
    model: PlannedModel, hardware: Hardware, traffic: Traffic, choices: Choices
) -> Settings:
    """Before layout and load are looked at. Raises ConfigError for a length that can't be."""
    is_cpu = hardware.device.is_cpu
    longest = traffic.lengths.longest + _TEMPLATE_TOKENS
    grained = _LENGTH_GRAIN * math.ceil(longest / _LENGTH_GRAIN)
    length = choices.max_model_len or min(grained, model.spec.max_position)
    if length > model.spec.max_position:
        raise ConfigError(
            f"--max-model-len {length} is more than the {model.spec.max_position} positions that "
            "the model has; lower it"
        )
    share = choices.memory_share or (_CPU_SHARE if is_cpu else _GPU_SHARE)
    return Settings(
        memory_share=share,
        num_seqs=choices.num_seqs or (_CPU_SEQS if is_cpu else _GPU_SEQS),
        token_budget=choices.token_budget or (_CPU_BUDGET if is_cpu else _GPU_BUDGET),
        max_model_len=length,
        kv=choices.kv or KVFormat("bfloat16"),
        block_size=choices.block_size,
        kv_memory_bytes=choices.kv_memory_bytes,
        frees_windows=not is_cpu,
    )


def candidates(
    model: PlannedModel,
    hardware: Hardware,
    traffic: Traffic,
    promise: Promise | None,
    settings: Settings,
    choices: Choices,
    costs: CostSource | None = None,
) -> list[Candidate]:
    """All layouts, best first; those that rules reject last."""
    found = []
    for layout in _asked_layouts(hardware, choices):
        deployed = Deployed(
            model=model,
            hardware=hardware,
            layout=layout,
            settings=settings,
            traffic=traffic,
            costs=costs,
        )
        findings = tuple(matching(Kind.LAYOUT, layout_facts(deployed).as_dict()))
        candidate = Candidate(deployed, findings)
        if not candidate.is_rejected:
            lane = deployed.lane_at(deployed.load)
            candidate = replace(
                candidate,
                capacity=deployed.capacity(promise),
                output_rate=lane.output_rate * busy_lanes(deployed),
                worst=_worst(deployed, lane, promise),
            )
        found.append(candidate)
    return _ranked(found, promise)


def corrected(
    ranked: list[Candidate], chosen: Deployed, promise: Promise | None, first: Layout | None = None
) -> list[Candidate]:
    """Ranked again, all with what the simulation of the chosen one corrected, and that one with its
    own settings. first: a layout that stays first.
    """
    found = []
    for one in ranked:
        if one.is_rejected:
            found.append(one)
            continue
        deployed = one.deployed.but(corrections=chosen.corrections)
        if one.layout == chosen.layout:
            deployed = chosen
        lane = deployed.lane_at(deployed.load)
        worst = _worst(deployed, lane, promise)
        rate = lane.output_rate * busy_lanes(deployed)
        if deployed.load.rate is None or not lane.is_stable:  # else as much as comes
            rate *= deployed.rate_correction
        found.append(replace(one, deployed=deployed, capacity=deployed.capacity(promise),
                             output_rate=rate, worst=worst))  # fmt: skip
    return sorted(_ranked(found, promise), key=lambda one: one.layout != first)


def _ranked(found: list[Candidate], promise: Promise | None) -> list[Candidate]:
    traffic = found[0].deployed.traffic
    demand = traffic.users if traffic.users is not None else traffic.rate or 0.0
    best = max((one.capacity for one in found), default=0.0)
    return sorted(found, key=lambda one: _order(one, demand, best, promise))


def busy_lanes(deployed: Deployed) -> float:
    """Lanes that have work: fewer users than lanes leave some without."""
    users = deployed.load.users
    return deployed.lanes if users is None else min(deployed.lanes, users)


def _worst(deployed: Deployed, lane: LaneResult, promise: Promise | None) -> float:
    limits = () if promise is None else promise.limits
    return max(
        (deployed.quantile_ms(lane, limit.metric, limit.q) / limit.limit_ms for limit in limits),
        default=0.0,
    )


def _order(one: Candidate, demand: float, best: float, promise: Promise | None) -> list[float]:
    """Those that serve the load with headroom: fewer devices a replica first, then the one that is
    further below its limits. Then by capacity within the SLO, in steps of a tenth of the best;
    where no layout keeps it, the nearest to it. Without an SLO, by output at the load. What rules
    reject comes last, the one with the fewest bytes of weights a device first.
    """
    devices = float(one.layout.devices)
    if one.is_rejected:
        return [3.0, one.deployed.memory.weight_bytes, devices]
    if promise is None:
        return [0.0, -round(math.log(max(one.output_rate, 1e-9), 1.1)), devices]
    if one.capacity >= _HEADROOM * demand:
        return [0.0, devices, one.worst]
    if one.capacity:
        return [1.0, -math.floor(10 * one.capacity / best + 1e-9), devices, one.worst]
    return [2.0, one.worst, devices]


def _asked_layouts(hardware: Hardware, choices: Choices) -> Iterator[Layout]:
    if choices.tp is None and choices.pp is None:
        yield from layouts(hardware)
        return
    tp, pp = choices.tp or 1, choices.pp or 1
    if tp * pp > hardware.count:
        raise ConfigError(
            f"--tensor-parallel-size {tp} times --pipeline-parallel-size {pp} is more than the "
            f"{hardware.count} devices of --hardware"
        )
    yield Layout(tp, pp, hardware.count // (tp * pp))


def tuned(deployed: Deployed, promise: Promise | None, choices: Choices) -> Deployed:
    """The step's tokens for the load, where they weren't told: the default, or what serves clearly
    more. As many sequences as memory holds, up to the default.
    """
    if choices.token_budget is None:
        deployed = _with_budget(deployed, promise)
    if choices.num_seqs is None:
        room = max(1, int(deployed.memory.users_mean))
        count = min(deployed.settings.num_seqs, room)
        deployed = deployed.but(settings=deployed.settings.but(num_seqs=count))
    return deployed


def with_batch(deployed: Deployed, capacity: float, choices: Choices) -> Deployed:
    """The sequences that run at once, where they weren't told: as many as do at the capacity, so
    that who is too many waits instead of slowing all down, but not fewer than the load brings.
    """
    if choices.num_seqs is not None or not capacity:
        return deployed
    load = deployed.load
    at = replace(load, users=capacity) if load.users is not None else replace(load, rate=capacity)
    batch = max(deployed.lane_at(one).batch for one in (at, load)) * deployed.layout.pp
    count = min(8 * math.ceil(max(batch, 1) / 8), deployed.settings.num_seqs)
    return deployed.but(settings=deployed.settings.but(num_seqs=count))


def _with_budget(deployed: Deployed, promise: Promise | None) -> Deployed:
    """A request that comes while a full step runs waits for that, then for its own prompt: so a
    larger step than the default's takes no more than half of the limit of a first token.
    """
    is_cpu = deployed.hardware.device.is_cpu
    first_token = None if promise is None else promise.limit("ttft")
    longest_s = math.inf if first_token is None else first_token.limit_ms / 2e3
    default = deployed.settings.token_budget
    best, most = deployed, _WORTH * max(_served(deployed, promise), 1e-9)
    for budget in _CPU_BUDGETS if is_cpu else _GPU_BUDGETS:
        is_long = budget > default and deployed.steps.mixed(0, budget) > longest_s
        if budget == default or is_long:
            continue
        other = deployed.but(settings=deployed.settings.but(token_budget=budget))
        if other.memory.fits and (served := _served(other, promise)) > most:
            best, most = other, 1.001 * served
    return best


def _served(deployed: Deployed, promise: Promise | None) -> float:
    if promise is not None:
        return deployed.capacity(promise)
    users = deployed.most_running * deployed.lanes
    return deployed.lane_at(Load(users=users)).output_rate
