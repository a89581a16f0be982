"""What no engine can beat on a device: weights must be read, prompts must be multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.advisor.layout import Layout
from octavo.advisor.model import PlannedModel
from octavo.advisor.promise import Limit, Promise
from octavo.advisor.traffic import Traffic
from octavo.core.model_spec import KVFormat
from octavo.simulator.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Bound:
    """floor_ms: of the metric, for one user alone, at 100 % of the specification. how: in words."""

    metric: str
    floor_ms: float
    how: str

    def forbids(self, limit: Limit) -> bool:
        return limit.metric == self.metric and limit.limit_ms < self.floor_ms

    def to_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "floor_ms": round(self.floor_ms, 4), "how": self.how}


def bounds(
    model: PlannedModel, hardware: Hardware, layout: Layout, traffic: Traffic, kv: KVFormat
) -> tuple[Bound, Bound, Bound]:
    """Of TPOT, TTFT and end-to-end latency. A pipeline's stages work one after another, so they
    don't lower them; hits in a prefix cache count as if all came true.
    """
    spec, device, lengths = model.spec, hardware.device, traffic.lengths
    bandwidth = device.read_bytes_per_second * layout.tp
    head = model.rest.num_bytes(spec.num_embedding_parameters)
    read = model.matrices.num_bytes(spec.num_touched_parameters(1)) + head
    context = spec.kv_bytes_per_sequence(round(lengths.context), kv, frees_windows=True)
    tpot_s = (read + context) / bandwidth
    tpot = Bound(
        "tpot",
        1e3 * tpot_s,
        f"{(read + context) / 1e9:.2f} GB of weights and KV are read for each token, at "
        f"{_bandwidth(bandwidth)}",
    )
    prompt = max(1.0, lengths.input_mean * (1 - traffic.hit_rate))
    flops = spec.linear_flops(prompt, 1)
    peak = device.peak_flops(model.matrices.compute) * layout.tp
    by_flops, by_bytes = flops / peak, read / bandwidth
    ttft_s = max(by_flops, by_bytes)
    work = (
        f"{flops / 1e12:.1f} TFLOP for {prompt:,.0f} prompt tokens at {peak / 1e12:,.0f} TFLOP/s"
        if by_flops >= by_bytes
        else f"{read / 1e9:.2f} GB of weights are read at {_bandwidth(bandwidth)}"
    )
    ttft = Bound("ttft", 1e3 * ttft_s, work)
    e2e_s = ttft_s + max(0.0, lengths.output_mean - 1) * tpot_s
    e2e = Bound("e2e", 1e3 * e2e_s, f"the two above, for {lengths.output_mean:,.0f} tokens")
    return tpot, ttft, e2e


def _bandwidth(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e12:
        return f"{bytes_per_s / 1e12:.2f} TB/s"
    return f"{bytes_per_s / 1e9:.0f} GB/s"


def forbidden(promise: Promise | None, floors: tuple[Bound, ...]) -> list[tuple[Limit, Bound]]:
    """Limits that lie below a floor."""
    limits = () if promise is None else promise.limits
    return [(limit, bound) for limit in limits for bound in floors if bound.forbids(limit)]
