"""What would have to change for an SLO to be kept, nearest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.advisor.choosing import Choices, candidates, first_settings, tuned
from octavo.advisor.estimate import Deployed, Prediction
from octavo.advisor.promise import Promise
from octavo.core.model_spec import KVFormat
from octavo.core.weight_format import WEIGHT_FORMATS, WeightFormat
from octavo.simulator.cost_model import Provenance
from octavo.simulator.hardware import Device, Hardware, device_names, parse_hardware

_NARROWER: Mapping[str, tuple[str, ...]] = {
    "float32": ("fp8", "int8", "int4"),
    "bfloat16": ("fp8", "int8", "int4"),
    "float16": ("fp8", "int8", "int4"),
    "fp8": ("int4",),
    "int8": ("int4",),
}
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Change:
    """With which the model fits and the SLO is kept. text: what to do. effect: what it comes to.
    deployed: what is served then; None for changes of load or SLO. command: that starts it, and
    engine: of the command; empty where they weren't asked for.
    """

    kind: str
    text: str
    effect: str
    provenance: Provenance
    deployed: Deployed | None = None
    engine: str = ""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "text", "effect", "provenance")
        return {name: getattr(self, name) for name in names} | {
            "engine": self.engine or None,
            "command": self.command or None,
        }


def nearest_changes(
    deployed: Deployed, promise: Promise | None, prediction: Prediction | None
) -> list[Change]:
    """deployed: corrected by its simulation. Of each kind the smallest change that is enough: of
    precision, of the number of devices, of the device; then what holds without a change: for how
    many users, or which limits.
    """
    found = list(_precision(deployed, promise))
    found += list(_more_devices(deployed, promise))
    found += list(_other_device(deployed, promise))
    found += list(_less_load(deployed, promise))
    if prediction is not None and prediction.is_stable:
        found.append(_relaxed(prediction))
    return found[: _MOST_SHOWN + 1]


def _precision(deployed: Deployed, promise: Promise | None) -> Iterator[Change]:
    """The widest format that is enough."""
    model, device = deployed.model, deployed.hardware.device
    for name in _NARROWER.get(model.matrices.name, ()):
        weights = WEIGHT_FORMATS[name]
        if not _is_worth_it(weights, device):
            continue
        narrow = replace(model, matrices=weights, quant_group=128 if weights.bits < 8 else 0)
        other = _replanned(deployed.but(model=narrow), promise)
        if other is not None and _is_enough(other, promise):
            yield _changed("precision", f"{name} weights", other, promise)
            return
    if deployed.settings.kv.bytes_per_pair(128) > 2 * 132 and "fp8" in device.flops:
        kept = deployed.settings.but(kv=KVFormat("fp8"))
        other = _replanned(deployed.but(settings=kept), promise)
        if other is not None and _is_enough(other, promise):
            yield _changed("precision", "fp8 KV cache", other, promise)


def _is_worth_it(weights: WeightFormat, device: Device) -> bool:
    """fp8 on devices that multiply it, int8 on those that don't."""
    if device.is_cpu:
        return weights.name != "fp8"
    has_fp8 = "fp8" in device.flops
    return {"fp8": has_fp8, "int8": not has_fp8}.get(weights.name, True)


def _more_devices(deployed: Deployed, promise: Promise | None) -> Iterator[Change]:
    """Twice and four times as many of the same, in any layout."""
    device, count = deployed.hardware.device, deployed.hardware.count
    if device.is_cpu:
        return
    for factor in (2, 4, 8):
        if count * factor > 16:
            return
        other = _replanned(deployed.but(hardware=Hardware(device, count * factor)), promise)
        if other is not None and _is_enough(other, promise):
            yield _changed("devices", f"{other.hardware}, as {other.layout}", other, promise)
            return


def _other_device(deployed: Deployed, promise: Promise | None) -> Iterator[Change]:
    """The slowest that is enough, as many as now."""
    now = deployed.hardware
    known = [parse_hardware(name).device for name in device_names()]
    faster = [one for one in known if one.read_bytes_per_second > now.device.read_bytes_per_second]
    for device in sorted(faster, key=lambda one: one.read_bytes_per_second):
        other = _replanned(deployed.but(hardware=Hardware(device, now.count)), promise)
        if other is not None and _is_enough(other, promise):
            yield _changed("device", f"{other.hardware}", other, promise)
            return


def _less_load(deployed: Deployed, promise: Promise | None) -> Iterator[Change]:
    capacity = deployed.capacity(promise)
    if capacity <= 0:
        return
    if deployed.load.users is not None:
        copies = math.ceil(deployed.load.users / capacity)
        text = f"{capacity:,.0f} users instead of {deployed.load.users:,.0f}"
    else:
        copies = math.ceil((deployed.load.rate or 0.0) / capacity)
        text = f"{capacity:.3g} requests/s instead of {deployed.load.rate:g}"
    effect = f"or {copies} of the whole, behind one balancer"
    yield Change("load", text, effect, deployed.provenance)


def _relaxed(prediction: Prediction) -> Change:
    """Limits at which nine of ten draws keep what is missed now."""
    parts = [
        str(replace(limit, limit_ms=_rounded_up(found.high)))
        for limit, found in prediction.limits_ms.items()
        if found.value > limit.limit_ms
    ]
    effect = "can be promised on what there is"
    return Change("slo", " and ".join(parts), effect, prediction.provenance)


def _changed(kind: str, text: str, other: Deployed, promise: Promise | None) -> Change:
    return Change(kind, text, _at_load(other, promise), other.provenance, other)


def choices_of(deployed: Deployed) -> Choices:
    """That a change leaves as they are."""
    return Choices(kv=deployed.settings.kv, max_model_len=deployed.settings.max_model_len)


def _replanned(deployed: Deployed, promise: Promise | None) -> Deployed | None:
    """With the layout and settings that suit it; corrections stay, as the best guess there is."""
    choices = choices_of(deployed)
    settings = first_settings(deployed.model, deployed.hardware, deployed.traffic, choices)
    ranked = candidates(
        deployed.model,
        deployed.hardware,
        deployed.traffic,
        promise,
        settings,
        choices,
        deployed.costs,
    )
    best = ranked[0]
    if best.is_rejected:
        return None
    return tuned(best.deployed, promise, choices).but(corrections=deployed.corrections)


def _is_enough(deployed: Deployed, promise: Promise | None) -> bool:
    if not deployed.memory.fits:
        return False
    if promise is None:
        return True
    lane = deployed.lane_at(deployed.load)
    return lane.is_stable and all(
        deployed.quantile_ms(lane, limit.metric, limit.q) <= limit.limit_ms
        for limit in promise.limits
    )


def _at_load(deployed: Deployed, promise: Promise | None) -> str:
    if promise is None:
        return f"fits, with KV for {deployed.memory.users_mean:,.0f} users"
    lane = deployed.lane_at(deployed.load)
    return ", ".join(
        f"{limit.metric.upper()} p{100 * limit.q:g} "
        f"{_ms(deployed.quantile_ms(lane, limit.metric, limit.q))}"
        for limit in promise.limits
    )


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _rounded_up(value: float) -> float:
    """To two digits that count."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / step) * step
