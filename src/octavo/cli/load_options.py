"""What `octavo bench serve` and `sweep` have in common: their options, and what comes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.arguments import number
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.session import Settings
    from octavo.bench.workloads.replay import FileWorkload
    from octavo.bench.workloads.workload import Workload

TargetArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SERVER",
        help="What to measure: a URL, e.g. http://localhost:8000; `octavo` with flags of `octavo "
        "serve` in quotes; or any command with {port} in it, which is started and ended here. "
        "Several are measured one after another.",
    ),
]
WorkloadOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="chat, rag, code, mixed, long-generation, shared-prefix, azure_conv, azure_code, "
        "mooncake_conv; a workload's .yaml file; or requests from a file: ShareGPT, BurstGPT, "
        "Azure or Mooncake traces, vLLM's custom JSONL.",
    ),
]
ScaleOption = Annotated[
    str, typer.Option(metavar="NUMBER", help="Of all lengths, e.g. 1/16 for a small model.")
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="IN,OUT[,RATIO]",
        help="Instead of --workload: so many tokens in and out, each ± RATIO of it.",
    ),
]
SloOption = Annotated[
    str | None,
    typer.Option(
        metavar="SLO",
        help="What must hold: 'ttft_p99<500ms,tpot_p99<50ms', or 'attain(ttft<500ms & tpot<50ms) "
        ">= 0.95'. Gives goodput and attainment.",
    ),
]
SecondsOption = Annotated[
    float,
    typer.Option("--seconds", metavar="FLOAT", help="How long a load point lasts, about.", min=1),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of the server's models (default: its first).")
]
ApiOption = Annotated[
    str | None,
    typer.Option(metavar="API", help="completions or chat (default: completions if it has them)."),
]
KeyOption = Annotated[
    str | None, typer.Option(metavar="KEY", help="Bearer token.", envvar="OCTAVO_API_KEY")
]
HeaderOption = Annotated[
    list[str] | None, typer.Option("--header", metavar="K=V", help="Of every request.")
]
ExtraBodyOption = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Fields of every request, e.g. {"temperature": 1}.'),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model or tokenizer.json that counts tokens (default: the server's own, by /tokenize "
        "or by what its answers count).",
    ),
]
BurstinessOption = Annotated[
    float | None,
    typer.Option(
        metavar="FLOAT",
        help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier (the "
        "coefficient of variation is 1/sqrt of it). Default: as the workload says.",
        min=0.001,
    ),
]
SeedOption = Annotated[int, typer.Option(metavar="INT", help="Of lengths, words and arrivals.")]
WorkersOption = Annotated[
    int | None,
    typer.Option(metavar="INT", help="Processes that make load (default: as needed).", min=1),
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where the run goes (default: octavo-bench-DATE-TIME)."),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="--out may have an older run, which is lost.")
]


def settings_of(
    *,
    workload: str,
    scale: str,
    lengths: str | None,
    seconds: float,
    slo: str | None,
    burstiness: float | None,
    time_scale: float | None,
    model: str | None,
    api: str | None,
    api_key: str | None,
    headers: list[str],
    extra_body: str | None,
    tokenizer: str | None,
    workers: int | None,
    keep_text: bool = False,
) -> Settings:
    """Raises ConfigError that names the option."""
    from octavo.bench.session import Settings
    from octavo.bench.slo import parse_slo
    from octavo.bench.workloads.replay import FileWorkload

    if api not in (None, "completions", "chat"):
        raise ConfigError(f"--api must be completions or chat, got {api!r}")
    sampling = {"temperature": 0, **_json_object("--extra-body", extra_body or "{}")}
    load = _workload(workload, number("--scale", scale), lengths, tokenizer)
    if time_scale is not None and not isinstance(load, FileWorkload):
        raise ConfigError(
            f"--replay plays the times of a trace's file, and {load.name!r} is none: give one with "
            "--workload, or a --request-rate instead"
        )
    return Settings(
        workload=load,
        slo=None if slo is None else parse_slo(slo),
        seconds_per_point=seconds,
        burstiness=burstiness,
        time_scale=time_scale,
        model=model,
        api=api,  # type: ignore[arg-type]  # checked above
        api_key=api_key,
        headers=dict(map(_header, headers)),
        sampling=sampling,
        tokenizer=tokenizer,
        workers=workers,
        keep_text=keep_text,
    )


def _workload(
    name: str, scale: float, lengths: str | None, tokenizer: str | None
) -> Workload | FileWorkload:
    from octavo.bench.workloads.presets import preset_names, workload_named
    from octavo.bench.workloads.replay import FileWorkload
    from octavo.bench.workloads.tokenizing import encoder_named
    from octavo.bench.workloads.workload import Workload

    if lengths is not None:
        parts = [number("--lengths", part) for part in lengths.split(",")]
        ratio = parts[2] if len(parts) == 3 else 0.0
        if len(parts) not in (2, 3) or min(parts[:2]) < 1 or ratio >= 1:
            raise ConfigError(
                "--lengths must be IN,OUT or IN,OUT,RATIO, such as 128,16 or 128,16,0.5, got "
                f"{lengths!r}"
            )
        return Workload.of_lengths(round(parts[0]), round(parts[1]), ratio).scaled(scale)
    path = Path(name)
    if name in preset_names() or path.suffix in (".yaml", ".yml") or not path.is_file():
        return workload_named(name).scaled(scale)
    encode = None if tokenizer is None else encoder_named(tokenizer)
    count = None if encode is None else (lambda text: len(encode(text)))
    return FileWorkload(path=path, scale=scale, count_tokens=count)


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"--header must be NAME=VALUE, got {text!r}")
    return name.strip(), value.strip()


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text!r}")
    return value
