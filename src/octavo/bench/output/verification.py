"""A verification on a screen, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from octavo.bench.output.text import number
from octavo.bench.points import Estimate
from octavo.bench.verification import (
    CONFIDENCE,
    THROUGHPUT,
    TPOT,
    TTFT,
    Figure,
    Prediction,
    Verification,
    Verified,
    is_inside,
)

_AIMS: Mapping[Figure, float] = {TTFT: 0.20, TPOT: 0.10, THROUGHPUT: 0.05}
"""The largest error that is as good as a plan needs."""
_AIMED_COVERAGE = (0.80, 0.97)
_SHOWN = (TTFT, TPOT, THROUGHPUT)
_LABEL, _PREDICTED, _MEASURED = 16, 18, 12


def verification_lines(found: Verification) -> list[str]:
    """Predicted with its interval, measured, error; then what it comes to. "!" is outside."""
    heads = [f"{figure.name}, {figure.unit}" for figure in _SHOWN]
    lines = [
        " " * _LABEL + "".join(f"{head:<{_PREDICTED + _MEASURED}}" for head in heads),
        f"{'load':<{_LABEL}}"
        + f"{'predicted':<{_PREDICTED}}{'measured':<{_MEASURED}}" * len(_SHOWN),
    ]
    for one in found.verified:
        rows = {figure: (predicted, measured) for figure, predicted, measured in one.rows()}
        line = f"{_load(one.prediction):<{_LABEL}}"
        for figure in _SHOWN:
            cells = ("-", "-")
            if figure in rows:
                predicted, measured = rows[figure]
                mark = " " if is_inside(predicted, measured) else "!"
                cells = _short(predicted), f"{number(measured)}{mark}{_error(*rows[figure]):+.0%}"
            line += f"{cells[0]:<{_PREDICTED}}{cells[1]:<{_MEASURED}}"
        lines.append(line)
    return [line.rstrip() for line in (*lines, "", *summary(found))]


def summary(found: Verification) -> list[str]:
    """The errors next to what is aimed at, and how many intervals held."""
    lines = []
    for figure, aim in _AIMS.items():
        errors = found.errors(figure)
        if errors:
            mean, most = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
            verdict = "met" if abs(most) <= aim else "missed"
            lines.append(
                f"{figure.name}: off by {mean:.1%} in the mean, {_percent(most)} at most "
                f"(aim: {aim:.0%}, {verdict})"
            )
    inside, total = found.num_covered()
    low, high = _AIMED_COVERAGE
    lines.append(
        f"{CONFIDENCE:.0%} intervals: {inside} of {total} measured figures lie inside "
        f"({inside / total:.0%}; aim: {low:.0%} to {high:.0%})"
    )
    lines.append(
        f"learned from {found.costs.num_steps:,} recorded steps, of which one is off by "
        f"{found.costs.mean_error:.1%} in the mean; client and server add {found.client_ms:.1f} ms "
        "to TTFT"
    )
    bad = [
        f"{_load(one.prediction)}: {check.id} ({check.value})"
        for one in found.verified
        for check in one.point.checks
        if check.status == "fail"
    ]
    return [*lines, *(f"not a valid measurement: {each}" for each in bad)]


def verification_markdown(found: Verification) -> str:
    """All figures."""
    head = (
        "| workload | load | requests/s | figure | predicted | 90 % interval | measured | error |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for one in found.verified:
        prediction = one.prediction
        for figure, predicted, measured in one.rows():
            inside = "" if is_inside(predicted, measured) else " (outside)"
            cells = (
                prediction.workload,
                f"{prediction.load:.0%}",
                number(prediction.rate),
                f"{figure.name}, {figure.unit}",
                number(predicted.value),
                f"{number(predicted.low or 0)} to {number(predicted.high or 0)}",
                f"{number(measured)}{inside}",
                _percent(_error(predicted, measured)),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in summary(found))]) + "\n"


def verification_json(found: Verification) -> dict[str, Any]:
    inside, total = found.num_covered()
    return {
        "capacities": found.capacities,
        "client_ms": found.client_ms,
        "num_steps": found.costs.num_steps,
        "mean_step_error": found.costs.mean_error,
        "coverage": inside / total,
        "points": [_point_json(one) for one in found.verified],
    }


def predictions_json(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [asdict(prediction) for prediction in predictions]


def _point_json(one: Verified) -> dict[str, Any]:
    measured = {figure.name: value for figure, _, value in one.rows()}
    checks = {check.id: check.status for check in one.point.checks}
    return {**asdict(one.prediction), "measured": measured, "checks": checks}


def _load(prediction: Prediction) -> str:
    return f"{prediction.workload[:10]} {prediction.load:.0%}"


def _short(estimate: Estimate) -> str:
    return f"{number(estimate.value)} [{number(estimate.low or 0)}, {number(estimate.high or 0)}]"


def _error(predicted: Estimate, measured: float) -> float:
    return measured / predicted.value - 1


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
