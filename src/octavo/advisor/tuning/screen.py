"""What tuning found on a screen: at most 20 lines of 100 columns."""

from __future__ import annotations

import textwrap

from octavo.advisor.tuning import words
from octavo.advisor.tuning.run import Tuned
from octavo.advisor.tuning.space import as_text, value_text
from octavo.bench.output.text import interval, number, printable

MOST_LINES = 20
WIDTH = 100

_MOST_EFFECTS = 5


def tune_lines(tuned: Tuned, *, config: str, folder: str) -> list[str]:
    """The verdict; finalists against the default; what each knob does; notes; what to do next."""
    result = tuned.result
    lines = [words.title_of(tuned), *_wrapped(words.verdict_of(tuned))]
    if promise := words.promise_of(tuned, result.winner):
        lines += _wrapped(promise, indent="  ")
    end = [f"to serve: {words.serve_command(tuned, config)}"]
    end += [f"{what}: {command}" for what, command in words.check_commands(tuned, config)]
    end.append(f"all trials and the report: {folder}")
    rest = [*_finalists(tuned), *_effects(tuned), *_counts(tuned)]
    rest += [line for note in words.notes_of(tuned) for line in _wrapped(f"note: {note}")]
    room = max(0, MOST_LINES - len(lines) - len(end))
    if len(rest) > room:
        rest = [*rest[: room - 1], "… more in the report"]
    return [printable(line) for line in (*lines, *rest, *end)]


def _finalists(tuned: Tuned) -> list[str]:
    final, space = tuned.result.final, tuned.result.space
    lines = []
    for setting, gain in sorted(final.gains.items(), key=lambda one: -one[1].ratio.value):
        if setting != tuned.result.winner and gain.ratio.value > 0:
            name = as_text(space.changes(setting))
            lines.append(f"also confirmed: {name}: ×{interval(gain.ratio)}")
    return lines


def _effects(tuned: Tuned) -> list[str]:
    result = tuned.result
    effects = [*result.effects, *tuned.simulated_effects]
    # Those that matter most first, measured ones before simulated ones.
    effects.sort(key=lambda e: (e.is_simulated, -abs(1 - e.ratio.value)))
    lines = [
        f"{effect.knob} {value_text(effect.before)} → {value_text(effect.after)}: "
        + words.ratio_of(effect)
        + (" (simulated)" if effect.is_simulated else "")
        for effect in effects[:_MOST_EFFECTS]
    ]
    if not lines:
        return []
    return ["one knob changed, the edge becomes:", *(f"  {line}" for line in lines)]


def _counts(tuned: Tuned) -> list[str]:
    result = tuned.result
    served = len({m.setting for m in result.measurements})
    simulated = ""
    if result.screened is not None:
        simulated = f"{result.screened.num_tried:,} settings simulated, "
    return [
        f"{simulated}{served} served, in {len(result.measurements)} plays and "
        f"{number(result.took_s)} s"
    ]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
