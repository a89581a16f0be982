"""`octavo plan verify`: how far what is planned is from what is measured."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.arguments import JsonOption, number
from octavo.cli.load_options import OutOption, OverwriteOption, ScaleOption, SeedOption

if TYPE_CHECKING:
    from octavo.bench.session import Settings
    from octavo.bench.verification import Prediction
    from octavo.bench.workloads.workload import Workload


_WORKLOADS = ("chat", "rag")


def verify(
    server: Annotated[
        str,
        typer.Argument(metavar="SERVER", help="`octavo` with flags of `octavo serve`, in quotes."),
    ] = "octavo",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="NAME",
            help="A preset, or a workload's YAML file; may be given again (default: chat and rag).",
        ),
    ] = None,
    scale: ScaleOption = "1",
    loads: Annotated[
        str, typer.Option(metavar="SHARE,...", help="Of each workload's capacity.")
    ] = "0.3,0.5,0.7,0.85",
    seconds: Annotated[
        float, typer.Option(metavar="FLOAT", help="How long each load is measured.", min=5)
    ] = 45.0,
    draws: Annotated[
        int, typer.Option(metavar="INT", help="Simulations behind an interval.", min=10)
    ] = 30,
    seed: SeedOption = 0,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict a server under load, then measure it.

    A server's steps are recorded, from a lone user to many, and what they cost is learned. The
    simulator then says what TTFT, TPOT and throughput will be at shares of the capacity that it
    finds, with 90 % intervals; after that the same loads are measured on a fresh server. The folder
    has predictions.json, written before the measurement, costs.json for `octavo simulate`, the
    figures as verification.json and .md, and every run.
    """
    import asyncio

    from octavo.bench.ab.planning import model_of
    from octavo.bench.launch import parse_arm
    from octavo.bench.output.folder import new_folder
    from octavo.bench.output.run import without_keys
    from octavo.bench.output.verification import (
        predictions_json,
        verification_json,
        verification_lines,
        verification_markdown,
    )
    from octavo.bench.progress import progress_bars
    from octavo.bench.session import Settings
    from octavo.bench.verification import VerifyPlan
    from octavo.bench.verification import verify as run
    from octavo.bench.workloads.presets import workload_named
    from octavo.simulator.model_configs import spec_from_config
    from octavo.weights.source import DEFAULT, open_checkpoint

    arm = parse_arm(server)
    if not arm.is_octavo:
        raise typer.BadParameter("SERVER is `octavo` with flags: only its steps can be recorded")
    factor = number("--scale", scale)
    plan = VerifyPlan(
        workloads=tuple(workload_named(name).scaled(factor) for name in workload or _WORKLOADS),
        loads=tuple(number("--loads", part) for part in loads.split(",")),
        seconds_per_point=seconds,
        num_draws=draws,
        seed=seed,
    )
    spec = spec_from_config(open_checkpoint(model_of([arm]) or DEFAULT).config)
    folder = new_folder(out, overwrite=overwrite)

    def settings_for(workload: Workload, seconds: float) -> Settings:
        return Settings(workload=workload, seconds_per_point=seconds)

    def on_predicted(predictions: Sequence[Prediction]) -> None:
        _write(folder / "predictions.json", predictions_json(predictions))

    with progress_bars() as progress:
        found = asyncio.run(
            run(
                arm,
                plan,
                settings_for,
                spec,
                folder,
                without_keys(shlex.join(["octavo", *sys.argv[1:]])),
                progress,
                on_predicted,
            )
        )
    values = verification_json(found)
    _write(folder / "verification.json", values)
    (folder / "verification.md").write_text(verification_markdown(found), encoding="utf-8")
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        print("\n".join([*verification_lines(found), f"all figures and runs: {folder}"]))


def _write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
