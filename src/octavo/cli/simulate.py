"""`octavo simulate`: the scheduler under a load, on hardware that need not be here."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import octavo
from octavo.cli.arguments import JsonOption, ModelArgument, configuration, number, whole_numbers
from octavo.cli.load_options import (
    OutOption,
    OverwriteOption,
    ScaleOption,
    SeedOption,
    require_times,
    workload_of,
)
from octavo.cli.settings import Flags, takes_knobs
from octavo.config import DEFAULT_MODEL
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.advisor.model import PlannedModel
    from octavo.bench.load.plan import LoadSpec
    from octavo.bench.output.run import Served
    from octavo.bench.sweep import SweepPlan
    from octavo.config import Config
    from octavo.core.model_spec import ModelSpec
    from octavo.simulator.cost_model import CostModel
    from octavo.simulator.executor import OnStep
    from octavo.simulator.hardware import Hardware
    from octavo.simulator.roofline import Deployment
    from octavo.simulator.sizing import Sized

_INVALID = 2
_SLO_MISSED = 1
_USUAL_ACCEPTANCE = 0.7
# Knobs that have no part in how long steps take.
_FOR_TEXT = (
    "chat_template",
    "download_dir",
    "generation_config",
    "max_logprobs",
    "override_generation_config",
    "record_steps",
    "served_model_name",
)


@takes_knobs("model", "cache", "scheduler", "speculation", without=_FOR_TEXT)
def simulate(
    flags: Flags,
    model_argument: ModelArgument = None,
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME[:COUNT]", help="H100, L4:2, MI300X, ...; cpu is this machine."),
    ] = "cpu",
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(metavar="INT", help="Devices that share each layer (default: all).", min=1),
    ] = None,
    pipeline_parallel_size: Annotated[
        int, typer.Option(metavar="INT", help="Groups that share the layers.", min=1)
    ] = 1,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="bf16, fp8, int4, Q4_K, ... (default: as stored)."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What steps cost, as it was learned from recorded ones."),
    ] = None,
    acceptance: Annotated[
        float,
        typer.Option(metavar="FLOAT", help="Of guessed tokens, if some are.", min=0, max=1),
    ] = _USUAL_ACCEPTANCE,
    workload: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="As for `octavo bench`.")
    ] = "chat",
    scale: ScaleOption = "1",
    lengths: Annotated[
        str | None,
        typer.Option(metavar="IN,OUT[,RATIO]", help="Instead of --workload: so many tokens."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="INT,...", help="Closed loops of so many users.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates",
            "--request-rate",
            "--rate",
            metavar="FLOAT,...",
            help="Open loops, requests/s. Without any load it is a sweep: users are doubled, then "
            "the rate that keeps the SLO is searched for.",
        ),
    ] = None,
    replay: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR", help="The times of a trace's file, multiplied by this.", min=0.001
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT", help="Of arrivals, as for `octavo bench`.", min=0.001, max=1e6
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="FLOAT", help="How long a load lasts, in its own time.", min=1, max=1e7
        ),
    ] = 60.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            "--num-prompts",
            metavar="INT",
            help="So many, instead of --seconds; of one load.",
            min=1,
        ),
    ] = None,
    slo: Annotated[str | None, typer.Option(metavar="SLO", help="As for `octavo bench`.")] = None,
    seed: SeedOption = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Counts the tokens of a workload's texts."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A timeline of all steps, for ui.perfetto.dev."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of all this: play what --record-steps has written, and see whether every "
            "step is decided as it was.",
        ),
    ] = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Play a load against the scheduler alone, in virtual time.

    The scheduler, its policies and its cache are the real ones; steps take as long as a cost model
    says, and nothing is computed. It leaves the folder of `octavo bench`. No weights are read.

    The exit status is 1 if the SLO was missed, 2 if the run isn't valid.
    """
    with ExitStack() as stack:
        on_step: OnStep | None = None
        if trace is not None:
            from octavo.simulator.trace import StepTrace

            on_step = stack.enter_context(StepTrace(trace))
        if recorded is not None:
            _play_recorded(recorded, on_step)
            return
        from octavo.bench.output.folder import new_folder
        from octavo.bench.output.screen import show_run
        from octavo.bench.simulated import Simulated
        from octavo.bench.simulated_run import simulated_run
        from octavo.bench.slo import parse_slo

        load = _load(concurrency, rates, replay, num_requests, seed, seconds)
        config = configuration(flags, model_argument)
        sized, model_costs, served = _engine(
            config,
            hardware=hardware,
            tensor_parallel=tensor_parallel_size,
            pipeline_parallel=pipeline_parallel_size,
            weights=weights,
            costs=costs,
        )
        played = workload_of(workload, number("--scale", scale), lengths, tokenizer)
        require_times(played, replay)
        simulated = Simulated(
            scheduler=sized.settings,
            costs=model_costs,
            workload=played,
            slo=None if slo is None else parse_slo(slo),
            seconds_per_point=seconds,
            burstiness=burstiness,
            time_scale=replay,
            acceptance=(acceptance,) * len(sized.settings.draft_lengths),
        )
        folder = new_folder(out, overwrite=overwrite)
        run, notes = simulated_run(
            simulated,
            load,
            served,
            folder,
            command=shlex.join(["octavo", *sys.argv[1:]]),
            on_step=on_step,
            progress=lambda stage: print(stage, file=sys.stderr),
        )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(run.to_json(), indent=2))
    else:
        for decision in sized.decisions:
            print(f"{decision.what:16} {decision.value} ({decision.reason})")
        show_run(run, folder=folder)
    if not run.is_valid:
        raise typer.Exit(_INVALID)
    if not run.findings and any(point.slo_met is False for point in run.points):
        raise typer.Exit(_SLO_MISSED)


def _load(
    concurrency: str | None,
    rates: str | None,
    replay: float | None,
    num_requests: int | None,
    seed: int,
    seconds: float,
) -> LoadSpec | SweepPlan:
    """One load, or a sweep over several, or over those that show most."""
    from octavo.bench.load.plan import LoadSpec
    from octavo.bench.sweep import SweepPlan

    users = whole_numbers("--concurrency", concurrency) if concurrency else []
    offered = [number("--rates", rate) for rate in rates.split(",")] if rates else []
    if replay is not None:
        if users or offered:
            raise typer.BadParameter("--replay has its own times; leave the loads out")
        return LoadSpec(rate=1.0, seed=seed, num_requests=num_requests)
    if len(users) + len(offered) == 1:
        return LoadSpec(
            concurrency=users[0] if users else None,
            rate=offered[0] if offered else None,
            seed=seed,
            num_requests=num_requests,
        )
    if num_requests is not None:
        raise typer.BadParameter("--num-requests is for one --concurrency or one --rate")
    return SweepPlan(
        concurrencies=tuple(users), rates=tuple(offered), seed=seed, seconds_per_point=seconds
    )


def _engine(
    config: Config,
    *,
    hardware: str,
    tensor_parallel: int | None,
    pipeline_parallel: int,
    weights: str | None,
    costs: Path | None,
) -> tuple[Sized, CostModel, Served]:
    """What is simulated, and how the run's folder names it. Raises ConfigError."""
    from octavo.advisor.model import read_model
    from octavo.bench.output.run import Served
    from octavo.core.weight_format import quantized_formats
    from octavo.parallel.layout import NO_BLOCKS
    from octavo.simulator.hardware import parse_hardware
    from octavo.simulator.roofline import Deployment
    from octavo.simulator.sizing import drafter_of, kv_format, size_engine

    asked = config.model

    def read(name: str, weights: str | None = None, revision: str | None = None) -> PlannedModel:
        return read_model(_path_of(name), weights=weights, revision=revision, token=asked.hf_token)

    model = read(asked.model, weights, asked.revision)
    matrices, rest, weight_bytes = model.matrices, model.rest, model.weight_bytes
    blocks = model.blocks
    if weights is None and asked.quantization is not None:
        matrices, rest = quantized_formats(asked.quantization)
        weight_bytes, blocks = model.spec.weight_bytes(matrices, rest), NO_BLOCKS
    devices = parse_hardware(hardware)
    deployment = Deployment(
        tensor_parallel=tensor_parallel or max(1, devices.count // pipeline_parallel),
        pipeline_parallel=pipeline_parallel,
        matrices=matrices,
        rest=rest,
        kv=kv_format(config.cache, devices.device, matrices, rest),
        drafter=drafter_of(config, model.spec, lambda name: read(name).spec),
    )
    used = deployment.tensor_parallel * deployment.pipeline_parallel
    if used != devices.count:
        raise ConfigError(
            f"--hardware {hardware} has {devices.count} devices, and {used} are used by "
            f"--tensor-parallel-size {deployment.tensor_parallel} and --pipeline-parallel-size "
            f"{pipeline_parallel}; make them equal"
        )
    model_costs = _costs(costs, model.spec, devices, deployment)
    sized = size_engine(config, model.spec, devices, deployment, model_costs, weight_bytes, blocks)
    served = Served(
        base_url="",
        model=model.name,
        api="completions",
        engine="octavo, simulated",
        name=str(devices),
        version=octavo.__version__,
        max_model_len=sized.settings.max_model_len,
        settings={one.what: one.value for one in sized.decisions},
    )
    return sized, model_costs, served


def _costs(
    learned: Path | None, spec: ModelSpec, hardware: Hardware, deployment: Deployment
) -> CostModel:
    """As they were learned; else of this machine, by the speed of its kernels; else by
    specifications.
    """
    if learned is not None:
        from octavo.simulator.fitted import FittedCost

        found = FittedCost.load(learned)
        if found.windows != spec.windows:
            raise ConfigError(f"--costs {learned} were learned from steps of another model")
        return found
    if hardware.device.is_cpu:
        from octavo.bench.op_speeds import measured_cost

        return measured_cost(spec, deployment)
    from octavo.simulator.roofline import Roofline

    return Roofline(spec, hardware, deployment)


def _path_of(model: str) -> str:
    """The default model's file in place of its name; fetched if need be."""
    if model != DEFAULT_MODEL:
        return model
    from octavo.weights import default_model

    return str(default_model.fetch())


def _play_recorded(path: Path, on_step: OnStep | None) -> None:
    from octavo.engine.recording import open_recording
    from octavo.simulator.replay import replay

    replayed = replay(open_recording(path), on_step=on_step)
    if replayed.difference is not None:
        step_id, what = replayed.difference
        raise ConfigError(
            f"{path}: {replayed.num_steps} steps are decided as they were recorded; step {step_id} "
            f"is not: {what}"
        )
    print(f"{path}: all {replayed.num_steps} steps are decided as they were recorded")
