"""`octavo plan`: whether a model on some hardware keeps an SLO under some traffic, and how."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.arguments import number
from octavo.cli.plan_options import (
    HardwareOption,
    InputOption,
    KVOption,
    ModelOption,
    OutputOption,
    RevisionOption,
    ScaleOption,
    ShareOption,
    TokenOption,
    UsersOption,
    WeightsOption,
    WorkloadOption,
)
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.advisor.estimate import CostSource
    from octavo.advisor.layout import Layout
    from octavo.advisor.model import PlannedModel
    from octavo.advisor.plan import Plan, Question
    from octavo.core.model_spec import KVFormat
    from octavo.simulator.cost_model import CostModel
    from octavo.simulator.hardware import Hardware

_NOT_GOOD = 1
_FORMATS = ("screen", "md", "json")


def plan(
    model: ModelOption = None,
    hardware: HardwareOption = "cpu",
    workload: WorkloadOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    scale: ScaleOption = "1",
    users: UsersOption = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate",
            "--rate",
            metavar="FLOAT",
            help="Instead of --users: requests a second at the peak.",
            min=0.001,
            max=1e6,
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Of arrivals: 1 is Poisson, less is burstier.",
            min=0.001,
            max=1e6,
        ),
    ] = None,
    prefix_share: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Of prompts, that all have in common.", min=0, max=0.99),
    ] = 0.0,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="SLO",
            help="'ttft<500ms,p99 tpot<50ms', or any of `octavo bench`. Without a percentile: p99.",
        ),
    ] = None,
    weights: WeightsOption = None,
    kv_cache_dtype: KVOption = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "--tp", metavar="INT", min=1)
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "--pp", metavar="INT", min=1)
    ] = None,
    gpu_memory_utilization: ShareOption = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Of KV, instead; 4G and the like.")
    ] = None,
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", help="Of a KV block.", min=1, max=256)
    ] = 16,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="INT", min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(metavar="INT", min=1)] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="INT", min=1)] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What steps cost, as `octavo plan verify` learned it."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the model in commands, if MODEL is a config.json."),
    ] = None,
    revision: RevisionOption = None,
    hf_token: TokenOption = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="screen|md|json", help="How it is shown.")
    ] = "screen",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write plan.json, plan.md and the load test's workload.yaml."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw it, as .png or .svg (octavo[bench])."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Print one rule, such as P8, with its source; no plan."),
    ] = None,
    prompt: Annotated[
        bool,
        typer.Option("--prompt", help="Also print the question as a sheet for a language model."),
    ] = False,
    ask: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Send the sheet to an OpenAI-compatible server; show its answer."
        ),
    ] = None,
    ask_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of that server (default: its first).")
    ] = None,
    ask_api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Of that server.", envvar="OCTAVO_API_KEY"),
    ] = None,
) -> None:
    """Plan a deployment: does it fit, is the SLO kept, with which engine and settings.

    Two screens: what to expect with intervals, the memory line by line, layout, engines with
    commands, knobs, a load test with what it should show, and the pitfalls of this case. Every
    number says where it is from: [spec], [measured], [fitted] or [prior].

    `octavo plan kv` shows the memory alone; `octavo plan verify` measures what was predicted.

    The exit status is 1 if the SLO is missed or it doesn't fit.
    """
    if explain is not None:
        from octavo.advisor.rules import rule_named

        print(rule_named(explain).explained())
        return
    if output_format not in _FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(_FORMATS)}")
    from octavo.advisor.plan import make_plan

    question = _question(
        model=model,
        hardware=hardware,
        traffic={
            "workload": workload,
            "input_len": input_len,
            "output_len": output_len,
            "scale": number("--scale", scale),
            "users": users,
            "rate": request_rate,
            "burstiness": burstiness,
            "prefix_share": prefix_share,
        },
        slo=slo,
        weights=weights,
        name=name,
        revision=revision,
        token=hf_token,
        costs=costs,
        choices={
            "tp": tensor_parallel_size,
            "pp": pipeline_parallel_size,
            "memory_share": gpu_memory_utilization,
            "num_seqs": max_num_seqs,
            "token_budget": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "kv_memory_bytes": kv_cache_memory_bytes,
            "kv": kv_cache_dtype,
            "block_size": block_size,
        },
    )
    made = make_plan(question)
    _show(made, "json" if as_json else output_format)
    if out is not None:
        _write(made, out)
    if picture is not None:
        from octavo.advisor.output.picture import draw_plan

        draw_plan(made, picture)
    if prompt or ask is not None:
        _second_opinion(made, prompt=prompt, url=ask, model=ask_model, api_key=ask_api_key)
    if not made.is_good:
        raise typer.Exit(_NOT_GOOD)


def kv(
    model: ModelOption = None,
    hardware: HardwareOption = "cpu",
    workload: WorkloadOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    scale: ScaleOption = "1",
    weights: WeightsOption = None,
    kv_cache_dtype: KVOption = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", metavar="INT", min=1)
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "--pp", metavar="INT", min=1)
    ] = 1,
    gpu_memory_utilization: ShareOption = None,
    revision: RevisionOption = None,
    hf_token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Only the memory of a plan: what a device holds, and how many users."""
    from octavo.advisor.choosing import Choices, first_settings
    from octavo.advisor.layout import Layout
    from octavo.advisor.memory import account, kv_format
    from octavo.advisor.model import read_model
    from octavo.advisor.output.contents import memory_section
    from octavo.advisor.output.screen import show_section
    from octavo.advisor.traffic import read_traffic
    from octavo.parallel.layout import refusals
    from octavo.simulator.hardware import parse_hardware

    if model is None:
        raise typer.BadParameter("MODEL is missing")
    planned = read_model(model, weights=weights, revision=revision, token=hf_token)
    traffic = read_traffic(
        workload=workload,
        input_len=input_len,
        output_len=output_len,
        scale=number("--scale", scale),
    )
    device = parse_hardware(hardware)
    choices = Choices(
        kv=None if kv_cache_dtype is None else kv_format(kv_cache_dtype),
        memory_share=gpu_memory_utilization,
    )
    layout = Layout(tensor_parallel_size, pipeline_parallel_size)
    if reasons := refusals(planned.spec, layout.in_engine, blocks=planned.blocks):
        raise ConfigError("; ".join(reasons))
    settings = first_settings(planned, device, traffic, choices)
    memory = account(planned, device, layout, settings, traffic.lengths)
    if as_json:
        print(json.dumps(memory.to_json(), indent=2))
    else:
        show_section(memory_section(memory, str(layout)))
    if not memory.fits:
        raise typer.Exit(_NOT_GOOD)


def _question(
    *,
    model: str | None,
    hardware: str,
    traffic: dict[str, Any],
    slo: str | None,
    weights: str | None,
    name: str | None,
    revision: str | None,
    token: str | None,
    costs: Path | None,
    choices: dict[str, Any],
) -> Question:
    from octavo.advisor.choosing import Choices
    from octavo.advisor.memory import kv_format
    from octavo.advisor.model import read_model
    from octavo.advisor.plan import Question
    from octavo.advisor.promise import read_promise
    from octavo.advisor.traffic import read_traffic
    from octavo.simulator.hardware import parse_hardware

    if model is None:
        raise typer.BadParameter("MODEL is missing")
    if choices["kv"] is not None:
        choices["kv"] = kv_format(choices["kv"])
    if choices["kv_memory_bytes"] is not None:
        choices["kv_memory_bytes"] = _bytes("--kv-cache-memory-bytes", choices["kv_memory_bytes"])
    planned = read_model(model, weights=weights, name=name, revision=revision, token=token)
    return Question(
        model=planned,
        hardware=[parse_hardware(one) for one in hardware.split(",")],
        traffic=read_traffic(**traffic),
        promise=None if slo is None else read_promise(slo),
        choices=Choices(**choices),
        costs=_learned(costs, planned) if costs is not None else _measured,
    )


def _bytes(flag: str, text: str) -> int:
    """Raises ConfigError."""
    from octavo.knob import parse_number

    try:
        value = int(parse_number(text))
    except ValueError:
        value = 0
    if value <= 0:
        raise ConfigError(f"{flag} must be a number of bytes such as 4G, got {text!r}")
    return value


def _learned(path: Path, planned: PlannedModel) -> CostSource:
    """From recorded steps of the planned model, as it is on the machine that they were recorded on.
    Raises ConfigError.
    """
    from octavo.simulator.fitted import FittedCost

    found = FittedCost.load(path)
    if found.windows != planned.spec.windows:
        raise ConfigError(f"--costs {path} were learned from another model than this one")

    def learned(
        model: PlannedModel, hardware: Hardware, layout: Layout, kv: KVFormat
    ) -> CostModel | None:
        is_same = model.matrices == planned.matrices and layout.devices == 1
        return found if is_same else None

    return learned


def _measured(
    model: PlannedModel, hardware: Hardware, layout: Layout, kv: KVFormat
) -> CostModel | None:
    """Of this machine's CPU, what its kernels were measured to take. The first plan measures, which
    takes some seconds; later ones read what it kept.
    """
    if not hardware.device.is_cpu or not model.octavo_runs(is_gpu=False):
        return None
    from octavo.bench.op_speeds import machine_speeds
    from octavo.simulator.measured import MeasuredCost, kernel_format
    from octavo.simulator.roofline import Deployment

    formats = {kernel_format(model.matrices), kernel_format(model.rest)}
    speeds = machine_speeds(formats, [kv.dtype])
    deployment = Deployment(matrices=model.matrices, rest=model.rest, kv=kv)
    return MeasuredCost(model.spec, speeds, deployment)


def _show(made: Plan, output_format: str) -> None:
    if output_format == "json":
        print(json.dumps(made.to_json(), indent=2))
    elif output_format == "md":
        from octavo.advisor.output.markdown import plan_markdown

        print(plan_markdown(made))
    else:
        from octavo.advisor.output.screen import show_plan

        show_plan(made)


def _write(made: Plan, out: Path) -> None:
    import yaml

    from octavo.advisor.load_test import WORKLOAD_FILE
    from octavo.advisor.output.markdown import plan_markdown

    values = made.question.traffic.workload_file()
    files = {
        "plan.json": json.dumps(made.to_json(), indent=2) + "\n",
        "plan.md": plan_markdown(made),
        WORKLOAD_FILE: yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {out} can't be written ({error.strerror}): name another folder"
        ) from None
    print(f"wrote plan.json, plan.md and {WORKLOAD_FILE} into {out}", file=sys.stderr)


def _second_opinion(
    made: Plan, *, prompt: bool, url: str | None, model: str | None, api_key: str | None
) -> None:
    from octavo.advisor.second_opinion import ask, beside, question_sheet

    sheet = question_sheet(made)
    if prompt:
        print(f"\n{sheet}")
    if url is not None:
        # OCTAVO_API_KEY may list several, for the server; any of them will do.
        key = api_key.split(",")[0] if api_key else None
        print(f"\n{beside(made)}\n{ask(url, sheet, model=model, api_key=key)}")
