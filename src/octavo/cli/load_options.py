"""What `octavo bench serve` and `sweep` have in common: their options, and what comes of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from octavo.cli.arguments import number
from octavo.cli.settings import collect_options
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
ScaleOption = Annotated[
    str, typer.Option(metavar="NUMBER", help="Of all lengths, e.g. 1/16 for a small model.")
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


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """An option each, as given."""

    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="chat, rag, code, mixed, long-generation, shared-prefix, azure_conv, azure_code, "
            "mooncake_conv; a workload's .yaml file; or requests from a file: ShareGPT, BurstGPT, "
            "Azure or Mooncake traces, vLLM's custom JSONL.",
        ),
    ] = "chat"
    scale: ScaleOption = "1"
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT[,RATIO]",
            help="Instead of --workload: so many tokens in and out, each ± RATIO of it.",
        ),
    ] = None
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="FLOAT", help="How long a load point lasts, about.", min=1
        ),
    ] = 30.0
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="SLO",
            help="What must hold: 'ttft_p99<500ms,tpot_p99<50ms', or 'attain(ttft<500ms & "
            "tpot<50ms) >= 0.95'. Gives goodput and attainment.",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier (the "
            "coefficient of variation is 1/sqrt of it). Default: as the workload says.",
            min=0.001,
        ),
    ] = None
    seed: SeedOption = 0
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the server's models (default: its first)."),
    ] = None
    api: Annotated[
        str | None,
        typer.Option(
            metavar="API", help="completions or chat (default: completions if it has them)."
        ),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Bearer token.", envvar="OCTAVO_API_KEY")
    ] = None
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="K=V", help="Of every request.")
    ] = None
    extra_body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Fields of every request, e.g. {"temperature": 1}.'),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model or tokenizer.json that counts tokens (default: the server's own, by "
            "/tokenize or by what its answers count).",
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(metavar="INT", help="Processes that make load (default: as needed).", min=1),
    ] = None
    out: OutOption = None
    overwrite: OverwriteOption = False

    def settings(
        self,
        *,
        slo: str | None = None,
        seconds: float | None = None,
        time_scale: float | None = None,
        keep_text: bool = False,
    ) -> Settings:
        """slo, seconds: in place of their options. Raises ConfigError that names the option."""
        from octavo.bench.session import Settings
        from octavo.bench.slo import parse_slo

        if self.api not in (None, "completions", "chat"):
            raise ConfigError(f"--api must be completions or chat, got {self.api!r}")
        sampling = {"temperature": 0, **_json_object("--extra-body", self.extra_body or "{}")}
        scale = number("--scale", self.scale)
        workload = workload_of(self.workload, scale, self.lengths, self.tokenizer)
        require_times(workload, time_scale)
        slo = slo or self.slo
        return Settings(
            workload=workload,
            slo=None if slo is None else parse_slo(slo),
            seconds_per_point=self.seconds if seconds is None else seconds,
            burstiness=self.burstiness,
            time_scale=time_scale,
            model=self.model,
            api=self.api,  # type: ignore[arg-type]  # checked above
            api_key=self.api_key,
            headers=dict(map(_header, self.header or [])),
            sampling=sampling,
            tokenizer=self.tokenizer,
            workers=self.workers,
            keep_text=keep_text,
        )


def takes_load(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb these options; its parameter `load` gets what LoadOptions is made of."""
    hints = get_type_hints(LoadOptions, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(LoadOptions)
    ]
    return collect_options(verb, options, into="load")


def workload_of(
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


def require_times(workload: Workload | FileWorkload, time_scale: float | None) -> None:
    """Raises ConfigError where times are to be played and there are none."""
    from octavo.bench.workloads.replay import FileWorkload

    if time_scale is not None and not isinstance(workload, FileWorkload):
        raise ConfigError(
            f"--replay plays the times of a trace's file, and {workload.name!r} is none: give one "
            "with --workload, or a --request-rate instead"
        )


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
