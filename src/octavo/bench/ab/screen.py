"""An experiment on a screen: at most 20 lines of 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from octavo.bench.ab.mechanisms import MECHANISMS
from octavo.bench.ab.results import (
    AbResult,
    ArmResult,
    Comparison,
    Effect,
    Regime,
    Verdict,
    metric_label,
)
from octavo.bench.output.text import interval, number, percentile, plus_minus, printable
from octavo.bench.points import Estimate

MOST_LINES = 20
WIDTH = 100

_LONGEST_NAME = 24
_SMALL = 0.02
"""Arms differ if they do by more than this share."""


def ab_lines(title: str, result: AbResult, *, folder: str = "") -> list[str]:
    """What must be known first: the tables of arms with verdicts; then whether outputs agree, the
    ladder, classes, notes.
    """
    lines = [title]
    for regime in result.regimes:
        lines += _table(result, regime)
    end = [f"INVALID: {sentence}" for sentence in result.invalid]
    rest = [
        *_on_verdicts(result),
        *_waterfall(result),
        *(line for each in result.comparisons for line in _more_on(each)),
        *(f"note: {note}" for note in result.notes),
    ]
    if folder:
        end.append(f"all figures, requests and logs: {folder}")
    room = MOST_LINES - len(lines)
    end = [line for text in end for line in _wrapped(text)][:room]
    rest = [line for text in rest for line in _wrapped(text)]
    if len(rest) > room - len(end):
        rest = [*rest[: max(0, room - len(end) - 1)], "… more in ab.json"][: room - len(end)]
    return [printable(line) for line in (*lines, *rest, *end)][:MOST_LINES]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _table(result: AbResult, regime: Regime) -> list[str]:
    """A line for each arm; as many mechanisms as fit, first those in which arms differ."""
    arms = [arm for arm in result.arms if arm.regime == regime.name]
    own = [each for each in result.comparisons if each.regime == regime.name]
    # A candidate with several baselines has its speed-ups below.
    counts = Counter(each.candidate for each in own)
    versus = {each.candidate: each for each in own if counts[each.candidate] == 1}
    known = [name for name in MECHANISMS if any(name in arm.mechanisms for arm in arms)]
    known.sort(key=lambda name: not _differs(name, [arm.mechanisms.get(name) for arm in arms]))
    lines: list[str] = []
    for count in range(len(known) + 1):
        shown = [name for name in MECHANISMS if name in known[:count]]
        wider = _aligned([_row(arm, regime, shown, versus.get(arm.name)) for arm in arms])
        if lines and max(map(len, wider)) > WIDTH:
            break
        lines = wider
    return [regime.label, *lines]


def _differs(name: str, values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    scale = 1.0 if MECHANISMS[name].is_share else max(map(abs, known))
    return len(known) < len(values) or max(known) - min(known) > _SMALL * scale


def _aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    """Columns that are empty in all rows are left out."""
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [columns, *([row[name] for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _row(
    arm: ArmResult, regime: Regime, mechanisms: Sequence[str], versus: Comparison | None
) -> dict[str, str]:
    row = {"": _short(arm.name)}
    if regime.name != "online":
        row["output tok/s"] = plus_minus(arm.output_rate)
    if regime.name == "offline":
        row["all in s"] = number(arm.makespan_s.value)
    else:
        ttft, tpot, e2e = (arm.metrics.get(name) for name in ("ttft", "tpot", "e2e"))
        row["TTFT ms p50/p90"] = f"{percentile(ttft, 'p50')}/{percentile(ttft, 'p90')}"
        row["TPOT ms"] = percentile(tpot, "p50")
        row["E2E s"] = percentile(e2e, "p50", scale=1e-3)
    for name in mechanisms:
        one = MECHANISMS[name]
        row[one.label] = one.text(arm.mechanisms[name]) if name in arm.mechanisms else ""
    failed = arm.num_requests - arm.num_ok
    row["failed"] = str(failed) if failed else ""
    row["speed-up"] = _speedup(versus.headline) if versus and versus.effects else ""
    return row


def _speedup(effect: Effect) -> str:
    verdict = {Verdict.NO_DIFFERENCE: "no difference", Verdict.UNKNOWN: "?"}
    return f"{_times(effect.speedup)} {verdict.get(effect.verdict, effect.verdict)}"


def _more_on(comparison: Comparison) -> list[str]:
    """What the tables don't say; intervals of these effects are in ab.json and in the pictures."""
    names = f"{comparison.candidate} against {comparison.baseline}, {comparison.regime}"
    if not comparison.effects:
        return [f"{names}: nothing to compare, as no request succeeded in both"]
    head, *others = comparison.effects
    parts = [f"{metric_label(head.metric)} {_times(head.speedup)}, {head.verdict}"]
    if head.verdict is Verdict.NO_DIFFERENCE and head.more_rounds is not None:
        parts[0] += (
            f" (about {head.more_rounds} more round{'s'[: head.more_rounds > 1]} would show 5 %)"
            if head.more_rounds
            else " (5 % would have shown)"
        )
    if others:
        parts.append(", ".join(f"{metric_label(e.metric)} {_factor(e)}" for e in others))
    classes = [e for e in comparison.class_effects if e.metric == "e2e"]
    if len(classes) > 1:
        parts.append(f"E2E by class: {', '.join(f'{e.class_name} {_factor(e)}' for e in classes)}")
    if (match := comparison.match) is not None:
        parts.append(
            f"outputs: {match.num_equal} of {match.num_compared} equal, {match.matched_share:.1%} "
            f"of {match.unit} before the first difference"
        )
    if comparison.num_unpaired:
        parts.append(f"{comparison.num_unpaired} requests without a partner are left out")
    return [f"{names}: {'; '.join(parts)}"]


def _on_verdicts(result: AbResult) -> list[str]:
    """Said where an interval and a verdict seem to contradict each other."""
    for comparison in result.comparisons:
        for effect in comparison.effects:
            low, high = effect.speedup.low, effect.speedup.high
            is_off_one = low is not None and high is not None and not low <= 1 <= high
            if is_off_one and effect.verdict is Verdict.NO_DIFFERENCE:
                return [
                    "an interval is of one metric alone, a verdict of all that were asked together "
                    "(Holm)"
                ]
    return []


def _factor(effect: Effect) -> str:
    """Marked where it may be chance."""
    is_shown = effect.verdict in (Verdict.FASTER, Verdict.SLOWER)
    return f"×{number(effect.speedup.value)}{'' if is_shown else '?'}"


def _waterfall(result: AbResult) -> list[str]:
    found = result.waterfall
    if found is None:
        return []
    factors = [f"×{step.factor.value:.2f} {step.change}" for step in found.steps]
    return [
        f"{found.first} {number(found.first_rate)} tok/s: {', '.join(factors)} = "
        f"{_times(found.total)}"
    ]


def _times(ratio: Estimate) -> str:
    return f"×{interval(ratio)}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
