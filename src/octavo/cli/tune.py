"""`octavo tune`: the settings that keep an SLO at the highest load."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.arguments import FOR_SERVERS, JsonOption, ModelArgument, configuration, number
from octavo.cli.load_options import OverwriteOption, ScaleOption, SeedOption
from octavo.cli.settings import Flags, takes_knobs
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.advisor.tuning.run import Tuned
    from octavo.config import ModelConfig
    from octavo.core.model_spec import ModelSpec


@takes_knobs(
    "model", "cache", "scheduler", "speculation", "backend", without=("seed", *FOR_SERVERS)
)
def tune(
    flags: Flags,
    slo: Annotated[
        str,
        typer.Option(
            metavar="SLO",
            help="What must hold: 'ttft_p99<500ms,tpot_p99<50ms', or 'attain(ttft<500ms & "
            "tpot<50ms) >= 0.95'.",
        ),
    ],
    model_argument: ModelArgument = None,
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="A preset, or a workload's YAML file.")
    ] = "chat",
    scale: ScaleOption = "1",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Of it all, e.g. 5m, 20m, 1h.")
    ] = "20m",
    knob: Annotated[
        list[str] | None,
        typer.Option(
            "--knob",
            metavar="NAME[=VALUE,...]",
            help="Tune this one; may be given again. Values: a list, or LOW..HIGH, doubled. "
            "`default` are those that change no output: max_num_seqs, max_num_batched_tokens, "
            "enable_chunked_prefill, block_size, gpu_memory_utilization, enable_prefix_caching, "
            "threads.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Another engine: vllm, sglang, tensorrt-llm (or trtllm), llama.cpp; a template's "
            ".yaml file; or a command with {port}, and {flags} where they go.",
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate/--no-simulate", help="Screen settings in the simulator first."),
    ] = True,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The config (default: best.yaml in --out)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For all trials (default: octavo-tune-DATE-TIME)."),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the settings that keep an SLO at the highest load.

    First the default is measured, and its steps teach the simulator what steps cost here. That
    screens many settings; the best of them race on the real engine, on the same requests, for ever
    higher loads; and the last three meet the default on requests that none has seen. A setting wins
    if it is better beyond doubt: else the default is the answer. What is written is a file for
    `octavo serve --config`, and a folder with all trials and a report. Flags of `octavo serve` hold
    for all settings, and are not tuned.
    """
    from octavo.advisor.tuning.engines import OctavoEngine, TemplateEngine, engine_named
    from octavo.advisor.tuning.folder import to_json, write_config, write_results
    from octavo.advisor.tuning.knobs import knob_space
    from octavo.advisor.tuning.run import Wish, tune
    from octavo.bench.ab.planning import seconds
    from octavo.bench.output.folder import new_folder
    from octavo.bench.output.run import without_keys
    from octavo.bench.slo import parse_slo
    from octavo.bench.workloads.presets import workload_named
    from octavo.machine import usable_cpus

    load = workload_named(workload).scaled(number("--scale", scale))
    load_flags = f"--workload {shlex.quote(workload)}"
    if number("--scale", scale) != 1:
        load_flags += f" --scale {shlex.quote(scale)}"
    promise, budget_s = parse_slo(slo), seconds(budget)
    spec = None
    engine: OctavoEngine | TemplateEngine
    if target in (None, "octavo"):
        config = configuration(flags, model_argument)
        engine = OctavoEngine(model_argument, flags, api_key=_api_key(flags))
        space = knob_space(knob or (), fixed=flags, num_cpus=usable_cpus())
        if simulate:
            spec = _spec(config.model)
        base = _base(flags, model_argument)
    else:
        if flags:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
            raise typer.BadParameter(f"{names}: for Octavo; --target has its own flags in it")
        engine = engine_named(str(target), model=model_argument, asked=knob or ())
        space, base = engine.space, {}
    folder = new_folder(out or _folder_name(), overwrite=overwrite)
    path = output or folder / "best.yaml"
    _make_room_for(path)
    wish = Wish(
        engine=engine,
        space=space,
        workload=load,
        slo=promise,
        budget_s=budget_s,
        folder=folder,
        load_flags=load_flags,
        seed=seed,
        spec=spec,
    )
    tuned = tune(wish, lambda words: print(f"{words} ...", file=sys.stderr, flush=True))
    command = without_keys(shlex.join(["octavo", *sys.argv[1:]]))
    write_config(path, tuned, base)
    for note in write_results(folder, tuned, command=command, config=str(path)):
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(to_json(tuned, command=command), indent=2))
    else:
        _show(tuned, path, folder)


def _folder_name() -> Path:
    from datetime import datetime

    return Path(f"octavo-tune-{datetime.now():%Y%m%d-%H%M%S}")


def _make_room_for(path: Path) -> None:
    """Its folder, before anything takes time. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {path.parent} of --output can't be made ({error.strerror}): name another"
        ) from None


def _spec(config: ModelConfig) -> ModelSpec | None:
    """Of the model, for the simulator; None if its family is unknown to that."""
    from octavo.simulator.model_configs import spec_from_config
    from octavo.weights import open_checkpoint

    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        token=config.hf_token,
    )
    try:
        return spec_from_config(checkpoint.config)
    except ConfigError as error:
        print(f"note: settings are not simulated: {error}", file=sys.stderr)
        return None


def _api_key(flags: Flags) -> str | None:
    """That servers started with the user's file ask for; the environment's keys they don't get."""
    from octavo.cli.settings import load_config

    if "config" not in flags:
        return None
    return next(iter(load_config({"config": flags["config"]}, environ={}).server.api_key), None)


def _base(flags: Flags, model: str | None) -> dict[str, Any]:
    """What the user has set, as a file for --config has it. Keys stay out of files."""
    from octavo.cli.config_file import read_config_file
    from octavo.config import knobs

    known = {knob.name: knob for knob in knobs()}
    base: dict[str, Any] = {} if model is None else {"model": model}
    if "config" in flags:
        base = read_config_file(Path(flags["config"])) | base
    for name, value in flags.items():
        if name != "config" and not known[name].secret:
            base[name.replace("_", "-")] = known[name].check(value)
    return base


def _show(tuned: Tuned, config: Path, folder: Path) -> None:
    """At most 20 lines."""
    from octavo.advisor.tuning.screen import tune_lines

    print("\n".join(tune_lines(tuned, config=str(config), folder=str(folder))))
