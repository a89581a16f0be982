"""A plan's picture: where the memory goes, and what latency does as users, or the rate, rise.

matplotlib comes with `octavo[bench]`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.advisor.estimate import Deployed
from octavo.advisor.memory import GIB
from octavo.advisor.output import contents
from octavo.advisor.plan import Plan
from octavo.advisor.promise import Limit
from octavo.advisor.queueing import StepTimes
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS, _DRAWS = 16, 40
_LOW, _HIGH = 0.05, 0.95


@dataclass(frozen=True, slots=True)
class _Curve:
    """By load: milliseconds with the interval that 90 of 100 draws lie in."""

    loads: list[float]
    values: list[float]
    lows: list[float]
    highs: list[float]


def draw_plan(plan: Plan, path: Path) -> None:
    """As .png or .svg. Raises ConfigError without matplotlib, or for a plan that has no load."""
    try:
        from octavo.bench.output import style
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--picture needs {error.name}, which octavo[bench] brings: pip install 'octavo[bench]'"
        ) from error
    if plan.prediction is None:
        raise ConfigError("--picture shows latency under load, and this model does not fit")
    with style.styled():
        figure = style.new_figure(
            contents.title(plan), f"{contents.subtitle(plan)}. {_first(plan)}", width=9.6, height=4
        )
        grid = figure.add_gridspec(1, 3, width_ratios=(1.05, 1.5, 1.5))
        _memory(figure.add_subplot(grid[0]), plan)
        for place, metric in enumerate(("ttft", "tpot"), start=1):
            _latency(figure.add_subplot(grid[place]), plan, metric)
        try:
            figure.savefig(path)
        except OSError as error:
            raise ConfigError(
                f"--picture {path} can't be written ({error.strerror}): name another file"
            ) from None


def _first(plan: Plan) -> str:
    verdict = plan.verdict.value
    return verdict[0].upper() + verdict[1:]


def _memory(axes: Axes, plan: Plan) -> None:
    """One bar, from the weights up to the memory that the engine may not have."""
    from octavo.bench.output import style

    memory = plan.deployed.memory
    lines = {line.label: line.value / GIB for line in memory.lines if line.unit == "bytes"}
    used = plan.deployed.hardware.device.memory_bytes / GIB
    weights = lines["weights of the layers"] + lines["embedding, head, norms"]
    users = min(plan.facts.users_each, memory.users_mean)
    taken = memory.kv_bytes / GIB * users / memory.users_mean
    kept_out = lines.get("not for the engine", lines.get("left to others", 0.0))
    parts = [
        ("weights", weights, style.BLUE),
        ("engine", max(0.0, used - weights - kept_out - memory.kv_bytes / GIB), style.PURPLE),
        (f"KV, {users:,.0f} users", taken, style.ORANGE),
        ("KV, free", memory.kv_bytes / GIB - taken, style.SKY),
        ("kept out", kept_out, style.FAINT),
    ]
    bottom = 0.0
    for name, size, color in parts:
        axes.bar([0], [size], bottom=[bottom], color=color, width=0.55)
        if size > 0.035 * used:
            axes.text(
                0.36,
                bottom + size / 2,
                f"{name}\n{size:.1f}",
                va="center",
                fontsize=8,
                color=style.INK,
            )
        bottom += size
    axes.set_title("memory of a device, GiB")
    axes.set_xlim(-0.4, 1.5)
    axes.set_ylim(0, 1.02 * used)
    axes.set_xticks([])
    axes.grid(visible=False, axis="x")


def _latency(axes: Axes, plan: Plan, metric: str) -> None:
    from octavo.bench.output import style

    promise = plan.question.promise
    limit = (promise.limit(metric) if promise is not None else None) or Limit(metric, 0.0, 0.99)
    deployed = plan.deployed
    is_closed = deployed.load.users is not None
    here = deployed.load.users or deployed.load.rate or 1.0
    top = 1.6 * max(here, plan.capacity)
    curve = _curve(deployed, limit, top)
    axes.fill_between(
        curve.loads, curve.lows, curve.highs, color=style.BLUE, alpha=0.18, linewidth=0
    )
    axes.plot(curve.loads, curve.values, color=style.BLUE)
    highest = max(1.25 * limit.limit_ms, 1.15 * curve.highs[_index(curve, here)])
    axes.set_xlim(0, top)
    axes.set_ylim(0, highest)
    if limit.limit_ms:
        axes.axhline(limit.limit_ms, color=style.ORANGE, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.text(
            0.02 * top,
            limit.limit_ms,
            f"limit {limit.limit_ms:g}",
            va="bottom",
            fontsize=8,
            color=style.ORANGE,
        )
    axes.axvline(here, color=style.MUTED, linewidth=1)
    _label(axes, here, highest, "this load", top)
    if plan.capacity and abs(plan.capacity - here) > 0.02 * top:
        axes.axvline(plan.capacity, color=style.GREEN, linewidth=1.2)
        _label(axes, plan.capacity, 0.9 * highest, f"capacity {plan.capacity:.3g}", top)
    axes.set_title(f"{metric.upper()} p{100 * limit.q:g}, ms, with its 90 % interval")
    axes.set_xlabel("users" if is_closed else "requests/s")


def _label(axes: Axes, x: float, y: float, text: str, top: float) -> None:
    from octavo.bench.output import style

    is_right = x > 0.6 * top
    axes.text(
        x + (-0.01 if is_right else 0.01) * top,
        y,
        text,
        ha="right" if is_right else "left",
        va="top",
        fontsize=8,
        color=style.INK,
        bbox=dict(style.HALO),
    )


def _index(curve: _Curve, load: float) -> int:
    return min(range(len(curve.loads)), key=lambda i: abs(curve.loads[i] - load))


def _curve(deployed: Deployed, limit: Limit, top: float) -> _Curve:
    loads = [top * (i + 0.2) / (_POINTS - 0.8) for i in range(_POINTS)]
    if deployed.load.users is not None:
        loads = [max(1.0, load) for load in loads]
    rng = random.Random(0)
    drawn = [deployed.steps_of(deployed.cost.draw(rng)) for _ in range(_DRAWS)]
    curve = _Curve(loads, [], [], [])
    at = _at(deployed, limit)
    for load in loads:
        found = sorted(at(load, steps) for steps in drawn)
        curve.values.append(at(load, None))
        curve.lows.append(min(found[int(_LOW * _DRAWS)], curve.values[-1]))
        curve.highs.append(max(found[int(_HIGH * _DRAWS)], curve.values[-1]))
    return curve


def _at(deployed: Deployed, limit: Limit) -> Callable[[float, StepTimes | None], float]:
    load = deployed.load

    def at(value: float, steps: StepTimes | None) -> float:
        users = None if load.users is None else value
        rate = None if load.rate is None else value
        lane = deployed.lane_at(replace(load, users=users, rate=rate), steps)
        return deployed.quantile_ms(lane, limit.metric, limit.q)

    return at
