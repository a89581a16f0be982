"""What no engine can beat on a device: weights must be read, prompts must be multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.advisor.estimate import Deployed
from octavo.advisor.promise import Limit, Promise
from octavo.simulator.cost_model import Provenance
from octavo.simulator.measured import MeasuredCost


@dataclass(frozen=True, slots=True)
class Bound:
    """floor_ms: of the metric's median, for one user alone, at 100 % of what the device can do.
    how: in words. provenance: of what it can do.
    """

    metric: str
    floor_ms: float
    how: str
    provenance: Provenance

    def forbids(self, limit: Limit) -> bool:
        """A guess forbids nothing."""
        return (
            self.provenance != "prior"
            and limit.metric == self.metric
            and limit.q >= 0.5
            and limit.limit_ms < self.floor_ms
        )

    @property
    def says(self) -> str:
        """Who sets it."""
        return "physics" if self.provenance == "specification" else "this machine, as measured,"

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "floor_ms": round(self.floor_ms, 4),
            "how": self.how,
            "provenance": self.provenance,
        }


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Of all devices of a layout that work on one step: bytes read and FLOPs, per second."""

    bandwidth: float
    flops: float
    provenance: Provenance
    of: str


def bounds(deployed: Deployed) -> tuple[Bound, Bound, Bound]:
    """Of TPOT, TTFT and end-to-end latency. A pipeline's stages work one after another, so they
    don't lower them; hits in a prefix cache count as if all came true.
    """
    model, traffic, kv = deployed.model, deployed.traffic, deployed.settings.kv
    spec, lengths, speeds = model.spec, traffic.lengths, _speeds(deployed)
    head = model.rest.num_bytes(spec.num_embedding_parameters)
    read = model.matrices.num_bytes(spec.num_touched_parameters(1)) + head
    context = spec.kv_bytes_per_sequence(round(lengths.context), kv, frees_windows=True)
    at = f"{_bandwidth(speeds.bandwidth)}{speeds.of}"
    tpot_s = (read + context) / speeds.bandwidth
    tpot = Bound(
        "tpot",
        1e3 * tpot_s,
        f"{(read + context) / 1e9:.2f} GB of weights and KV are read for each token, at {at}",
        speeds.provenance,
    )
    prompt = max(1.0, lengths.input_p50 * (1 - traffic.hit_rate))
    flops = spec.linear_flops(prompt, 1)
    by_flops, by_bytes = flops / speeds.flops, read / speeds.bandwidth
    ttft_s = max(by_flops, by_bytes)
    work = (
        f"{flops / 1e12:.3g} TFLOP for {prompt:,.0f} prompt tokens at {_flops(speeds.flops)}"
        f"{speeds.of}"
        if by_flops >= by_bytes
        else f"{read / 1e9:.2f} GB of weights are read at {at}"
    )
    ttft = Bound("ttft", 1e3 * ttft_s, work, speeds.provenance)
    e2e_s = ttft_s + max(0.0, lengths.output_p50 - 1) * tpot_s
    how = f"the two above, for {lengths.output_p50:,.0f} tokens"
    e2e = Bound("e2e", 1e3 * e2e_s, how, speeds.provenance)
    return tpot, ttft, e2e


def _speeds(deployed: Deployed) -> _Speeds:
    """Of GPUs by their data sheets; of CPUs, which have none, what kernels reached, or a guess."""
    device, cost = deployed.hardware.device, deployed.cost
    if isinstance(cost, MeasuredCost):
        of = " that kernels were measured to reach here"
        return _Speeds(cost.read_bytes_per_second, cost.flops_per_second, "measured", of)
    provenance: Provenance = "prior" if device.is_cpu else "specification"
    ranks = deployed.layout.tp
    return _Speeds(
        device.read_bytes_per_second * ranks,
        device.peak_flops(deployed.model.matrices.compute) * ranks,
        provenance,
        ", a guess" if device.is_cpu else "",
    )


def _bandwidth(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e12:
        return f"{bytes_per_s / 1e12:.2f} TB/s"
    return f"{bytes_per_s / 1e9:.0f} GB/s"


def _flops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.{0 if flops_per_s >= 1e13 else 2}f} TFLOP/s"


def forbidden(promise: Promise | None, floors: tuple[Bound, ...]) -> list[tuple[Limit, Bound]]:
    """Limits that lie below a floor."""
    limits = () if promise is None else promise.limits
    return [(limit, bound) for limit in limits for bound in floors if bound.forbids(limit)]
