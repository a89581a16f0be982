"""The verbs that measure servers over HTTP: `octavo bench serve|sweep|report`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.arguments import JsonOption, number, whole_numbers
from octavo.cli.load_options import LoadOptions, TargetArgument, takes_load
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.serve import Measured
    from octavo.bench.session import Settings

_INVALID = 2
_SLO_MISSED = 1


@takes_load
def serve(
    targets: TargetArgument,
    load: dict[str, Any],
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            metavar="INT",
            help="Closed loop: so many users, each of whom sends the next request when the last "
            "has ended.",
            min=1,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate",
            "--rate",
            metavar="FLOAT",
            help="Open loop: requests per second, whatever the server does. Latency counts from "
            "when a request was due.",
            min=0.001,
        ),
    ] = None,
    replay: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Open loop: the times of a trace's file, multiplied by this (2: half as fast), "
            "for --seconds or --num-prompts.",
            min=0.001,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            "--num-requests",
            metavar="INT",
            help="So many requests, instead of --seconds.",
            min=1,
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS", help="vLLM's form of an SLO: ttft:500, tpot:50, e2el:9000."
        ),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Also write vLLM's result JSON.")
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With the times and texts of each request.")
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it goes (default: --out).")
    ] = None,
    result_filename: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name (default: as vLLM names it).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a server at one load.

    Any OpenAI-compatible server: Octavo, vLLM, SGLang, TGI, llama.cpp, TensorRT-LLM. Shown are
    rates, TTFT, TPOT, ITL and end-to-end latency with 95 % intervals, and whether the run can be
    believed. The folder has every request, tables, pictures and report.html.

    The exit status is 1 if the SLO was missed, 2 if the run isn't valid.
    """
    from octavo.bench.load.plan import LoadSpec
    from octavo.bench.serve import save_vllm_result, single_point

    options = LoadOptions(**load)
    given = [value for value in (concurrency, request_rate, replay) if value is not None]
    if len(given) > 1:
        raise typer.BadParameter("give one of --concurrency, --request-rate and --replay")
    if goodput and options.slo:
        raise typer.BadParameter("--goodput is another form of --slo; give one of them")
    if options.burstiness is not None and request_rate is None:
        raise typer.BadParameter("--burstiness is for --request-rate")
    if (result_dir or result_filename) and not (save_result or save_detailed):
        raise typer.BadParameter("--result-dir and --result-filename are for --save-result")
    if result_dir and result_filename and len(targets) > 1:
        raise typer.BadParameter("--result-filename in one --result-dir is for one server only")
    settings = options.settings(
        slo=" ".join(goodput) if goodput else None, time_scale=replay, keep_text=save_detailed
    )
    spec = LoadSpec(
        concurrency=concurrency or (None if given else 1),
        rate=request_rate or (1.0 if replay else None),
        seed=options.seed,
        num_requests=num_prompts,
    )

    def save(measured: Measured, folder: Path) -> None:
        if save_result or save_detailed:
            for path in save_vllm_result(
                measured,
                settings=settings,
                folder=result_dir or folder,
                filename=result_filename,
                detailed=save_detailed,
            ):
                print(f"wrote {path}", file=sys.stderr)

    _measure_all(targets, options, settings, single_point(spec), as_json=as_json, then=save)


@takes_load
def sweep(
    targets: TargetArgument,
    load: dict[str, Any],
    concurrency: Annotated[
        str | None, typer.Option(metavar="INT,...", help="Closed loops of so many users.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", "--request-rates", metavar="FLOAT,...", help="Open loops, requests/s."
        ),
    ] = None,
    order: Annotated[
        str,
        typer.Option(metavar="ORDER", help="Of given points: random, or abba (up and down)."),
    ] = "random",
    max_concurrency: Annotated[
        int, typer.Option(metavar="INT", help="Where doubling ends at the latest.", min=1)
    ] = 256,
    tolerance: Annotated[
        float,
        typer.Option(metavar="FLOAT", help="Of the SLO's capacity, 0.05 is ±5 %.", min=0.001),
    ] = 0.05,
    seeds: Annotated[
        int, typer.Option(metavar="INT", help="Fresh ones that must confirm it.", min=1)
    ] = 3,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of the whole sweep, e.g. 90s, 10m, 1h.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a server at many loads: where it saturates, and what an SLO leaves.

    Without --concurrency and --rates, users are doubled until the output no longer rises; then, if
    there is an SLO, the request rate that keeps it is bracketed, bisected, and validated on fresh
    seeds. Shown are X_max, the most it puts out; N*, the users that it takes (the knee); and the
    SLO's capacity with its interval, the limit that binds, and whether it breaks gently or not.

    The exit status is 2 if the run isn't valid.
    """
    from octavo.bench.ab.planning import seconds as seconds_of
    from octavo.bench.serve import swept
    from octavo.bench.sweep import Order, SweepPlan

    if order not in tuple(Order):
        raise typer.BadParameter(f"--order must be one of {', '.join(Order)}, got {order!r}")
    options = LoadOptions(**load)
    plan = SweepPlan(
        concurrencies=tuple(whole_numbers("--concurrency", concurrency) if concurrency else ()),
        rates=tuple(number("--rates", rate) for rate in rates.split(",")) if rates else (),
        order=Order(order),
        max_concurrency=max_concurrency,
        tolerance=tolerance,
        num_seeds=seeds,
        seed=options.seed,
        seconds_per_point=options.seconds,
        budget_s=None if budget is None else seconds_of(budget),
    )
    settings = options.settings(seconds=plan.point_seconds(has_slo=options.slo is not None))
    _measure_all(targets, options, settings, swept(plan), as_json=as_json, is_slo_promised=False)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")],
    as_json: JsonOption = False,
) -> None:
    """Show a run again, and make its reports again.

    From run.json and requests.jsonl alone.
    """
    from octavo.bench.output.folder import read_folder
    from octavo.bench.output.reports import remake_reports
    from octavo.bench.output.screen import show_run

    run = read_folder(folder).run
    for note in remake_reports(folder):
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(run.to_json(), indent=2))
    else:
        show_run(run, folder=folder)


def _measure_all(
    targets: list[str],
    options: LoadOptions,
    settings: Settings,
    play: Callable[..., Any],
    *,
    as_json: bool,
    is_slo_promised: bool = True,
    then: Callable[[Measured, Path], None] = lambda measured, folder: None,
) -> None:
    """Each target in turn, into a folder of its own if there are several. Ends with the status.
    is_slo_promised: a point that misses the SLO fails the command; in a sweep some must.
    """
    import asyncio

    from octavo.bench.launch import parse_arm
    from octavo.bench.output.folder import new_folder
    from octavo.bench.output.screen import show_run
    from octavo.bench.progress import progress_bars
    from octavo.bench.serve import measure

    arms = [parse_arm(text) for text in targets]
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError("two servers have the same name; give each its own: NAME=SERVER")
    folder = new_folder(options.out, overwrite=options.overwrite)
    command = shlex.join(["octavo", *sys.argv[1:]])
    status = 0
    shown = []
    for place, arm in enumerate(arms, start=1):
        own = folder
        if len(arms) > 1:
            own = new_folder(folder / str(place), overwrite=options.overwrite)
        with progress_bars() as progress:
            measured = asyncio.run(measure(arm, settings, own, command, progress, play))
        run = measured.run
        for note in measured.notes:
            print(f"note: {note}", file=sys.stderr)
        then(measured, own)
        shown.append(run.to_json())
        if not as_json:
            show_run(run, folder=own)
        if not run.is_valid:
            status = _INVALID
        elif (
            status == 0 and is_slo_promised and any(point.slo_met is False for point in run.points)
        ):
            status = _SLO_MISSED
    if as_json:
        print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    if status:
        raise typer.Exit(status)
