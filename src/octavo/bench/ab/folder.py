"""What an experiment leaves behind: ab.json, requests, pictures; beside them are servers' logs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import octavo
from octavo.bench.ab.design import Block
from octavo.bench.ab.results import AbResult, Comparison, metric_label
from octavo.bench.output.folder import COMPARISON, PointKey, append_requests
from octavo.bench.output.plots import png_of
from octavo.bench.output.run import ClientMachine, git_revision

if TYPE_CHECKING:
    from octavo.bench.output.comparison_plots import Ratio

SCHEMA_VERSION = 1
"""Goes up when a reader of an older version would misread the file."""


def append_block(folder: Path, block: Block) -> None:
    """The block's requests, when it has been played: they are kept, whatever comes later."""
    key = PointKey(f"{block.run.point.label} {block.arm}", block.run.point.seed)
    append_requests(folder, key, block.run.records)


def ab_json(
    result: AbResult, *, title: str, command: str, workload: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values, with where and how they were measured. Headers of targets are left out: they
    may hold keys.
    """
    values = asdict(result)
    for arm in values["arms"]:
        del arm["target"]["headers"]
    head = {
        "schema_version": SCHEMA_VERSION,
        "octavo_version": octavo.__version__,
        "git_revision": git_revision(),
        "ended_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "title": title,
        "command": command,
        "client": asdict(ClientMachine.here()),
        "workload": workload,
    }
    return {**head, **values}


def write_result(folder: Path, values: dict[str, Any]) -> None:
    """values: of `ab_json`."""
    text = json.dumps(values, indent=2, allow_nan=False)
    (folder / COMPARISON).write_text(text + "\n", encoding="utf-8")


def draw(folder: Path, title: str, result: AbResult) -> None:
    """PNGs: each comparison's effects with their intervals, and the ladder. Needs matplotlib."""
    from octavo.bench.output import comparison_plots
    from octavo.bench.output.style import styled

    with styled():
        for number, comparison in enumerate(result.comparisons, start=1):
            if not comparison.effects:
                continue
            figure = comparison_plots.forest(
                _ratios(comparison),
                title=f"{comparison.candidate} against {comparison.baseline}, {comparison.regime}",
                subtitle=f"speed-up: above 1 it is faster; {title}",
            )
            (folder / f"effects-{number}.png").write_bytes(png_of(figure))
        if (ladder := result.waterfall) is not None:
            figure = comparison_plots.waterfall(
                [
                    comparison_plots.Factor(name=step.change, factor=step.factor)
                    for step in ladder.steps
                ],
                baseline=ladder.first,
                title="Output tokens/s, one change at a time",
                subtitle=title,
            )
            (folder / "waterfall.png").write_bytes(png_of(figure))


def _ratios(comparison: Comparison) -> list[Ratio]:
    """Of all requests first, then of each class; those of a metric together."""
    from octavo.bench.output.comparison_plots import Ratio

    effects = [*comparison.effects, *comparison.class_effects]
    labels = {effect.metric: metric_label(effect.metric) for effect in effects}
    return [
        Ratio(
            metric=label,
            class_name=effect.class_name or "all requests",
            ratio=effect.speedup,
            verdict=effect.verdict,
        )
        for metric, label in labels.items()
        for effect in effects
        if effect.metric == metric
    ]
