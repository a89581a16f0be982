"""`octavo ab`: two servers, or one with a setting changed, on the same requests."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer

from octavo.cli.arguments import JsonOption, number
from octavo.cli.load_options import OutOption, OverwriteOption, ScaleOption, SeedOption


def ab(
    a: Annotated[
        str,
        typer.Option(
            "--a",
            metavar="[NAME=]SERVER",
            help="The candidate: `octavo` with flags of `octavo serve`, a URL, hf-naive or "
            "hf-static with options, or any command with {port} in it.",
        ),
    ] = "octavo",
    b: Annotated[
        list[str] | None,
        typer.Option(
            "--b", metavar="[NAME=]SERVER", help="What it is compared with; may be given again."
        ),
    ] = None,
    knob: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Compare --a with itself: one setting at these values, the first is the baseline.",
        ),
    ] = None,
    waterfall: Annotated[
        bool,
        typer.Option(
            "--waterfall",
            help="From transformers to Octavo, one change at a time; the factors multiply to the "
            "total.",
        ),
    ] = False,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Of --waterfall; other arms name their own.")
    ] = "default",
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="A preset, or a workload's YAML file.")
    ] = "mixed",
    scale: ScaleOption = "1",
    num_requests: Annotated[
        int,
        typer.Option(
            "--num-prompts", "--num-requests", metavar="INT", help="Requests of each play.", min=1
        ),
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option(
            "--pairs", "--rounds", metavar="INT", help="How often each arm is played.", min=1
        ),
    ] = 4,
    rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate",
            "--rate",
            metavar="FLOAT",
            help="Only an open loop, at so many requests/s.",
            min=0.001,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            metavar="INT",
            help="Only a closed loop of so many users.",
            min=1,
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only offline, all requests at once.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Play fewer rounds if they take longer, e.g. 10m."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Whose tokenizer counts (default: the model's, where an arm names it).",
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Bearer token, sent to every arm.")
    ] = None,
    seed: SeedOption = 0,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare servers on the same requests.

    Each round plays every arm, on a server of its own that is started, warmed up, measured and
    ended; every second round in reverse. Shown are speed-ups with intervals, a verdict, whether the
    outputs agree, and what the servers' counters say of the reason. First all requests come at
    once, then at random times at 70 % of what the slowest arm can do. The exit status is 2 if the
    measurement is not valid.
    """
    from octavo.bench.ab import planning
    from octavo.bench.ab.experiment import Plan, Watch, run_experiment
    from octavo.bench.ab.folder import ab_json, append_block, draw, write_result
    from octavo.bench.ab.playing import tools_for
    from octavo.bench.ab.screen import ab_lines
    from octavo.bench.output.folder import new_folder
    from octavo.bench.output.plots import NO_PICTURES, can_draw
    from octavo.bench.output.run import without_keys
    from octavo.bench.workloads.presets import workload_named

    load = workload_named(workload).scaled(number("--scale", scale))
    plan = Plan(
        arms=(),
        against=(),
        regimes=planning.regimes(rate=rate, concurrency=concurrency, offline=offline or waterfall),
        num_rounds=rounds,
        num_requests=num_requests,
        seed=seed,
        budget_s=None if budget is None else planning.seconds(budget),
    )
    max_len = None
    if waterfall:
        if b or knob:
            raise typer.BadParameter("--waterfall has its own arms; leave out --b and --knob")
        tokenizer = tokenizer or model
        max_len = planning.longest_request(plan, load, tokenizer)
        plan = planning.with_ladder(plan, model, max_len)
    else:
        plan = planning.with_arms(plan, a, b or [], knob)
        tokenizer = tokenizer or planning.model_of(plan.arms)
    folder = new_folder(out, overwrite=overwrite)
    title = f"{num_requests} requests of {load.name}, up to {rounds} rounds"

    def on_start(words: str) -> None:
        print(f"{words} ...", file=sys.stderr)

    watch = Watch(on_start=on_start, on_block=lambda block: append_block(folder, block))
    tools = tools_for(load, tokenizer=tokenizer, max_len=max_len, api_key=api_key)
    result = run_experiment(plan, tools, folder / "logs", watch)
    values = ab_json(
        result,
        title=title,
        command=without_keys(shlex.join(["octavo", *sys.argv[1:]])),
        workload=load.model_dump(mode="json", by_alias=True, exclude_defaults=True),
    )
    write_result(folder, values)
    if can_draw():
        draw(folder, title, result)
    else:
        print(NO_PICTURES, file=sys.stderr)
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(ab_lines(title, result, folder=str(folder))))
    if result.invalid:
        raise typer.Exit(2)
