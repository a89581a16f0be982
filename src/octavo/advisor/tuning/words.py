"""What tuning found, in sentences and tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.advisor.tuning.engines import OctavoEngine
from octavo.advisor.tuning.final import Gain
from octavo.advisor.tuning.objective import FIGURES, Measurement
from octavo.advisor.tuning.run import Tuned
from octavo.advisor.tuning.sensitivity import Effect, interaction
from octavo.advisor.tuning.serving import is_out_of_memory
from octavo.advisor.tuning.space import Setting, as_text, value_text
from octavo.bench.ab.results import Comparison, Verdict, metric_label
from octavo.bench.ab.results import Effect as AbEffect
from octavo.bench.output.contents import Table
from octavo.bench.output.run import without_keys
from octavo.bench.output.text import interval, number, printable
from octavo.bench.points import Estimate

_CHECK_SEED = 5000
"""Of the comparison that users are told to check with: no play had it."""


def title_of(tuned: Tuned) -> str:
    target, wish = tuned.target, tuned.wish
    version = f" {target.version}" if target.version else ""
    engine = wish.engine.name if target.engine == "unknown" else f"{target.engine}{version}"
    return printable(f"{target.model} on {engine}, {wish.workload.name}, {wish.slo.text}")


def verdict_of(tuned: Tuned) -> str:
    """One sentence: what to serve with, and what it gains."""
    result = tuned.result
    final = result.final
    default_rate = final.mean_edge(result.space.default)
    if result.is_default_best:
        best = max(final.gains.values(), key=lambda gain: gain.ratio.value, default=None)
        tried = "nothing else could be confirmed"
        if best is not None and best.ratio.value > 0:
            tried = f"the best other reached ×{interval(best.ratio)} of that"
        return (
            f"the default is as good as anything tried: it keeps the SLO up to "
            f"{number(default_rate)} requests/s; {tried}"
        )
    setting = as_text(result.space.changes(result.winner))
    rate = number(final.mean_edge(result.winner))
    gain = final.gains[result.winner]
    if gain.bound is None:
        return f"{setting} keeps the SLO up to {rate} requests/s; the default can't be served"
    return (
        f"{setting} keeps the SLO up to {rate} requests/s, the default up to "
        f"{number(default_rate)}: ×{interval(gain.ratio)}, at least ×{number(gain.bound)}"
    )


def promise_of(tuned: Tuned, setting: Setting) -> str:
    """What `octavo ab` should see at the common rate; empty if nothing was played there."""
    comparison = tuned.promises.get(setting)
    if comparison is None or not comparison.effects:
        return ""
    effects = ", ".join(_effect_words(effect) for effect in comparison.effects)
    return f"at {number(tuned.result.common_rate)} requests/s, against the default: {effects}"


def serve_command(tuned: Tuned, config: str) -> str:
    """What serves the winner."""
    if isinstance(tuned.wish.engine, OctavoEngine):
        return f"octavo serve --config {shlex.quote(config)}"
    return started_as(tuned, tuned.result.space.changes(tuned.result.winner))


def check_commands(tuned: Tuned, config: str) -> list[tuple[str, str]]:
    """What shows the promise on requests that tuning has not seen, and what each shows: latencies
    at a rate that both can serve, and the SLO at one between their edges. Empty if nothing is
    promised, or the engine is one that Octavo does not start by a config.
    """
    wish, result = tuned.wish, tuned.result
    if result.is_default_best or not isinstance(wish.engine, OctavoEngine):
        return []
    key = " --api-key KEY" if wish.engine.api_key else ""
    best, default = f'octavo --config {config}"', f'"{started_as(tuned, {})}"{key}'
    load = f"{wish.load_flags} --seed {_CHECK_SEED}"
    checks = [
        (
            "to compare",
            f'octavo ab --a "tuned={best} --b {default} {load} --rate {result.common_rate:.3g}',
        )
    ]
    edges = [result.final.mean_edge(one) for one in (result.winner, result.space.default)]
    if all(edges):
        load += f" --rate {math.sqrt(math.prod(edges)):.3g} --slo {shlex.quote(wish.slo.text)}"
        checks.append(("to see the SLO", f'octavo bench serve "{best} {default} {load}'))
    return checks


def started_as(tuned: Tuned, changes: Mapping[str, Any]) -> str:
    """The command of a server with these changes, without keys."""
    return without_keys(tuned.wish.engine.arm(changes).text)


def notes_of(tuned: Tuned) -> list[str]:
    """What a reader must know besides."""
    result = tuned.result
    failed = {m.setting: m.outcome.failure for m in result.measurements if m.outcome.failure}
    notes = [*tuned.doubts, *result.notes]
    if failed:
        starved = sum(map(is_out_of_memory, failed.values()))
        memory = f", {starved} for lack of memory" if starved else ""
        notes.append(f"{len(failed)} settings could not be served{memory}: see the trials")
    taken_back = [effect for effect in result.effects if _is_back(tuned, effect)]
    gain = result.final.gains.get(result.winner)
    if gain is not None and len(taken_back) == len(result.space.changes(result.winner)):
        found = interaction(taken_back, gain.ratio)
        if found is not None and not (found.low or 0) <= 1 <= (found.high or 2):
            notes.append(
                "the knobs depend on each other: together they gain "
                f"×{interval(found)} of what each adds to the others"
            )
    if not result.final.seeds:
        notes.append("the budget ended before anything was confirmed")
    return notes


def tables_of(tuned: Tuned) -> list[Table]:
    tables = [_finalists(tuned), _sensitivity(tuned), _race(tuned), _cut(tuned), _failures(tuned)]
    return [table for table in tables if table.rows]


def facts_of(tuned: Tuned) -> list[tuple[str, str]]:
    """Where and how."""
    wish, result = tuned.wish, tuned.result
    screened = result.screened
    tried = {m.setting for m in result.measurements}
    facts = [
        ("engine", wish.engine.name),
        ("started as", started_as(tuned, {})),
        ("workload", wish.workload.name),
        ("SLO", wish.slo.text),
        ("budget", f"{wish.budget_s:g} s, of which the search took {result.took_s:.0f}"),
        ("seeds", f"from {wish.seed}; of the final {', '.join(map(str, result.final.seeds))}"),
        ("settings", f"{result.space.size:,} in all; {len(tried)} served"),
        ("plays", f"{len(result.measurements)}, of {result.play_s:.1f} s in the final"),
    ]
    if screened is not None:
        error = screened.default_edge.rate / result.default_edge.rate - 1
        facts.append(
            (
                "simulator",
                f"{screened.num_tried:,} settings; the default's edge is "
                f"{screened.default_edge.rate:.3g} requests/s there, {error:+.0%} of what was "
                "measured",
            )
        )
    return facts


def trial_rows(tuned: Tuned) -> list[dict[str, Any]]:
    """A row for each play, with a column for each knob."""
    space = tuned.result.space
    rows = []
    for count, one in enumerate(tuned.result.measurements, start=1):
        row: dict[str, Any] = {"number": count, "stage": one.stage}
        row |= {name: value_text(value) for name, value in space.named(one.setting).items()}
        row |= {
            "rate": one.load.rate,
            "seed": one.load.seed,
            "seconds": one.load.seconds,
            "slo_use": one.outcome.use,
            "share_within": one.outcome.share,
            "is_met": one.outcome.is_met,
        }
        row |= {name: one.outcome.figures.get(name, "") for name in FIGURES}
        rows.append({**row, "failure": one.outcome.failure})
    return rows


def ratio_of(effect: Effect) -> str:
    """What becomes of the edge."""
    if effect.failure:
        return effect.failure
    if effect.is_at_most:
        return f"×{number(effect.ratio.value)} or less"
    return f"×{interval(effect.ratio)}"


# --- tables -------------------------------------------------------------------------------------


def _finalists(tuned: Tuned) -> Table:
    final, space = tuned.result.final, tuned.result.space
    screened = tuned.result.screened
    predicted = {} if screened is None else screened.gains
    players = [space.default, *sorted(final.gains, key=lambda s: -final.gains[s].ratio.value)]
    rows = [
        [
            as_text(space.changes(setting)),
            number(final.mean_edge(setting)),
            *_gain_cells(final.gains.get(setting)),
            f"×{number(predicted[setting])}" if setting in predicted else "",
            _speedup(tuned.promises.get(setting), "ttft"),
            _speedup(tuned.promises.get(setting), "tpot"),
        ]
        for setting in players
        if final.edges.get(setting)
    ]
    return Table(
        "Finalists, on fresh seeds",
        ["setting", "SLO kept up to (requests/s)", "of the default's", "at least", "simulated",
         "TTFT speed-up", "TPOT speed-up"],
        rows,
        f"In brackets: 95 % intervals over {len(final.seeds)} seeds. At least: one-sided, 5 % over "
        "all finalists together; the setting with the highest wins if that is above 1. Speed-ups "
        f"are against the default, at {number(tuned.result.common_rate)} requests/s.",
    )  # fmt: skip


def _gain_cells(gain: Gain | None) -> list[str]:
    if gain is None:
        return ["", ""]
    if gain.ratio.value == 0:
        return ["failed", ""]
    return [f"×{interval(gain.ratio)}", "" if gain.bound is None else f"×{number(gain.bound)}"]


def _sensitivity(tuned: Tuned) -> Table:
    result = tuned.result
    effects = [*result.effects, *tuned.simulated_effects]
    rows = [
        [
            effect.knob,
            f"{value_text(effect.before)} → {value_text(effect.after)}",
            ratio_of(effect),
            str(effect.num_seeds),
            "simulated" if effect.is_simulated else "measured",
        ]
        for effect in effects
    ]
    center = as_text(result.space.changes(result.winner))
    return Table(
        f"Sensitivity: one knob changed, all others as in {center}",
        ["knob", "change", "edge becomes", "seeds", "how"],
        rows,
        "The edge is the highest rate at which the SLO is kept. In brackets: 95 % intervals.",
    )


def _race(tuned: Tuned) -> Table:
    space = tuned.result.space
    rows = [
        [
            str(count),
            number(rung.load.rate),
            f"{rung.load.seconds:.1f}",
            as_text(space.changes(setting)),
            outcome.failure or number(outcome.use),
            f"{outcome.share:.0%}",
            *(number(outcome.figures[name]) if name in outcome.figures else "" for name in _SHOWN),
        ]
        for count, rung in enumerate(tuned.result.race.rungs, start=1)
        for setting, outcome in rung.ranked
    ]
    return Table(
        "Race",
        ["rung", "requests/s", "seconds", "setting", "use of the SLO", "within the SLO",
         *(FIGURES[name] for name in _SHOWN)],
        rows,
        "All settings of a rung got the same requests at the same times. The SLO is kept up to a "
        "use of 1; the better half goes on, at the rate where it seems to have its edge.",
    )  # fmt: skip


_SHOWN = ("ttft_p90", "tpot_p90", "output_rate")


def _cut(tuned: Tuned) -> Table:
    rows = [[cut.knob, ", ".join(map(value_text, cut.values)), cut.why] for cut in tuned.cuts]
    return Table("Not tried", ["knob", "values", "why"], rows)


def _failures(tuned: Tuned) -> Table:
    space = tuned.result.space
    failed: dict[Setting, Measurement] = {}
    for one in tuned.result.measurements:
        if one.outcome.failure:
            failed.setdefault(one.setting, one)
    rows = [
        [as_text(space.changes(setting)), one.stage, printable(one.outcome.failure)]
        for setting, one in failed.items()
    ]
    return Table("Settings that could not be served", ["setting", "stage", "why"], rows)


# --- words --------------------------------------------------------------------------------------


def _effect_words(effect: AbEffect) -> str:
    if effect.verdict is Verdict.UNKNOWN:
        return f"{metric_label(effect.metric)} ×{number(effect.speedup.value)}"
    return f"{metric_label(effect.metric)} ×{interval(effect.speedup)} {effect.verdict}"


def _speedup(comparison: Comparison | None, metric: str) -> str:
    if comparison is None:
        return ""
    found: Sequence[Estimate] = [e.speedup for e in comparison.effects if e.metric == metric]
    return f"×{interval(found[0])}" if found else ""


def _is_back(tuned: Tuned, effect: Effect) -> bool:
    """Whether it takes a changed knob back to its default."""
    changes = tuned.result.space.changes(tuned.result.winner)
    return effect.knob in changes and effect.after is None
