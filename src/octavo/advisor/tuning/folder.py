"""What tuning leaves behind: a config to serve with, tune.json, trials.csv, a report, pictures."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

import octavo
from octavo.advisor.tuning import words
from octavo.advisor.tuning.engines import OctavoEngine
from octavo.advisor.tuning.run import Tuned
from octavo.advisor.tuning.space import Setting, as_text, value_text
from octavo.bench.output import html
from octavo.bench.output import markdown as md
from octavo.bench.output.plots import NO_PICTURES, Picture, can_draw, png_of
from octavo.bench.output.run import ClientMachine, git_revision
from octavo.bench.points import Estimate

SCHEMA_VERSION = 1
"""Goes up when a reader of an older version would misread the file."""

_AXES = (("ttft", "TTFT p90 (ms)"), ("tpot", "TPOT p90 (ms)"))


def write_config(path: Path, tuned: Tuned, base: Mapping[str, Any]) -> None:
    """The winner as a YAML file for `--config`: base, which is what the user had set, and what was
    changed in it. For an engine that has no such file, its command line is in the first lines.
    """
    wish, changes = tuned.wish, tuned.result.space.changes(tuned.result.winner)
    lines = [
        f"Found by octavo tune on {datetime.now():%Y-%m-%d} for {words.title_of(tuned)}:",
        words.verdict_of(tuned) + ".",
        f"Started as: {words.started_as(tuned, changes)}",
    ]
    head = "".join(f"# {line}\n" for line in lines)
    settings: dict[str, Any] = dict(base)
    if isinstance(wish.engine, OctavoEngine):
        settings |= {name.replace("_", "-"): value for name, value in changes.items()}
    else:
        flags = wish.engine.flags(changes)
        settings |= _by_flag(flags)
    text = yaml.safe_dump(settings, sort_keys=False) if settings else "{}\n"
    path.write_text(head + text, encoding="utf-8")


def write_results(folder: Path, tuned: Tuned, *, command: str, config: str) -> list[str]:
    """Everything else. config: the path that the config was written to. What it returns is to be
    told to the user.
    """
    values = to_json(tuned, command=command)
    text = json.dumps(values, indent=2, allow_nan=False)
    (folder / "tune.json").write_text(text + "\n", encoding="utf-8")
    rows = words.trial_rows(tuned)
    with (folder / "trials.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    pictures = _pictures(tuned) if can_draw() else []
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    parts: dict[str, Any] = {
        "title": words.title_of(tuned),
        "verdict": words.verdict_of(tuned),
        "reasons": words.notes_of(tuned),
        "pictures": pictures,
        "tables": words.tables_of(tuned),
        "facts": [
            ("command", command),
            ("to serve", words.serve_command(tuned, config)),
            *words.check_commands(tuned, config),
            *words.facts_of(tuned),
            ("octavo", octavo.__version__),
        ],
    }
    promise = words.promise_of(tuned, tuned.result.winner)
    findings = [promise] if promise else []
    (folder / "report.md").write_text(md.document(findings=findings, **parts), encoding="utf-8")
    page = html.document(
        findings=[(finding, "as octavo ab compares") for finding in findings],
        is_good=not tuned.result.is_default_best,
        **parts,
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    return [] if can_draw() else [NO_PICTURES]


def to_json(tuned: Tuned, *, command: str) -> dict[str, Any]:
    """Plain values. Infinite uses, of settings that failed, are null."""
    result, space = tuned.result, tuned.result.space
    final = result.final
    screened = result.screened

    def named(setting: Setting) -> dict[str, Any]:
        return space.changes(setting)

    return {
        "schema_version": SCHEMA_VERSION,
        "octavo_version": octavo.__version__,
        "git_revision": git_revision(),
        "ended_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "client": asdict(ClientMachine.here()),
        "model": tuned.target.model,
        "engine": tuned.target.engine,
        "workload": tuned.wish.workload.model_dump(
            mode="json", by_alias=True, exclude_defaults=True
        ),
        "slo": tuned.wish.slo.text,
        "budget_s": tuned.wish.budget_s,
        "took_s": result.took_s,
        "knobs": {d.name: list(d.values) for d in space.dimensions},
        "not_tried": [asdict(cut) for cut in tuned.cuts],
        "winner": named(result.winner),
        "default_is_best": result.is_default_best,
        "verdict": words.verdict_of(tuned),
        "final": {
            "seeds": list(final.seeds),
            "common_rate": result.common_rate,
            "edges": [
                {"setting": named(setting), "rates": [edge.rate for edge in edges]}
                for setting, edges in final.edges.items()
            ],
            "gains": [
                {
                    "setting": named(setting),
                    "ratio": asdict(gain.ratio),
                    "bound": gain.bound,
                    "simulated": None if screened is None else screened.gains.get(setting),
                    "at_common_rate": [
                        {"metric": e.metric, "speedup": asdict(e.speedup), "verdict": e.verdict}
                        for e in tuned.promises[setting].effects
                    ],
                }
                for setting, gain in final.gains.items()
            ],
        },
        "sensitivity": [asdict(e) for e in (*result.effects, *tuned.simulated_effects)],
        "simulated": None
        if screened is None
        else {
            "num_settings": screened.num_tried,
            "default_edge": screened.default_edge.rate,
            "measured_default_edge": result.default_edge.rate,
            "ranked": [
                {"setting": named(setting), "gain": screened.gains.get(setting)}
                for setting in screened.ranked
            ],
        },
        "plays": [
            {
                "stage": one.stage,
                "setting": named(one.setting),
                **asdict(one.load),
                "slo_use": one.outcome.use if math.isfinite(one.outcome.use) else None,
                "share_within": one.outcome.share,
                "failure": one.outcome.failure,
                **one.outcome.figures,
            }
            for one in result.measurements
        ],
        "notes": words.notes_of(tuned),
    }


def _pictures(tuned: Tuned) -> list[Picture]:
    from octavo.bench.output.style import styled

    with styled():
        drawn = [_trade_off(tuned), _sensitivity(tuned)]
    return [picture for picture in drawn if picture is not None]


def _trade_off(tuned: Tuned) -> Picture | None:
    """Of the first rung of the race, in which most settings got the same load."""
    from octavo.advisor.tuning import plots

    result = tuned.result
    rung = result.race.rungs[0]
    (x, x_label), (y, y_label) = _AXES
    places = [
        plots.Place(
            x=outcome.figures[f"{x}_p90"],
            y=outcome.figures[f"{y}_p90"],
            name=as_text(result.space.changes(setting)),
            is_default=setting == result.space.default,
            is_winner=setting == result.winner,
        )
        for setting, outcome in rung.ranked
        if {f"{x}_p90", f"{y}_p90"} <= outcome.figures.keys()
    ]
    if not places:
        return None
    near = plots.nearest(places)
    beyond = f"; {len(places) - len(near)} are far beyond" if len(near) < len(places) else ""
    limits = {term.metric: term.limit_ms for term in tuned.wish.slo.terms}
    figure = plots.trade_off(
        near,
        x_label=x_label,
        y_label=y_label,
        x_limit=limits.get(x),
        y_limit=limits.get(y),
        title=f"What settings trade, at {rung.load.rate:.3g} requests/s",
        subtitle=f"{words.title_of(tuned)}{beyond}; line: not beaten in both",
    )
    caption = (
        f"TTFT and TPOT (p90) of {len(places)} settings at {rung.load.rate:.3g} requests/s, with "
        "the front of those that no other beats in both"
    )
    return Picture("trade-off", caption, png_of(figure))


def _sensitivity(tuned: Tuned) -> Picture | None:
    from octavo.advisor.tuning import plots
    from octavo.bench.output.comparison_plots import Ratio

    effects = tuned.result.effects or tuned.simulated_effects
    known = [effect for effect in effects if effect.ratio.value > 0]
    if not known:
        return None
    how = "simulated" if known[0].is_simulated else "measured"
    ratios = [
        Ratio(
            metric=f"{effect.knob}: {value_text(effect.before)} → {value_text(effect.after)}",
            class_name="",
            ratio=Estimate(effect.ratio.value) if effect.is_at_most else effect.ratio,
            verdict="or less" if effect.is_at_most else _verdict(effect.ratio),
        )
        for effect in known
    ]
    center = as_text(tuned.result.space.changes(tuned.result.winner))
    figure = plots.sensitivity(
        ratios,
        title="What one knob does to the load at which the SLO is kept",
        subtitle=f"{how}, around {center}; {words.title_of(tuned)}",
    )
    return Picture("sensitivity", f"Effect of each knob around {center}, {how}", png_of(figure))


def _verdict(ratio: Estimate) -> str:
    """By the names that the picture has colours for."""
    if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return ""
    return "faster" if ratio.value > 1 else "slower"


def _by_flag(words_of_flags: list[str]) -> dict[str, Any]:
    """`--max-num-seqs 16 --no-x` as a mapping: max-num-seqs: 16, no-x: true."""
    settings: dict[str, Any] = {}
    name = ""
    for word in words_of_flags:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            name = word.lstrip("-")
            settings[name] = True
        else:
            settings[name] = yaml.safe_load(word)
    return settings
