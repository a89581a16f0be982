"""Options that several verbs of planning have."""

from __future__ import annotations

from typing import Annotated

import typer

ModelOption = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A hub id org/name, a folder, a .gguf file, or a config.json alone. Weights are never "
        "read: the files' headers are enough.",
        show_default=False,
    ),
]
HardwareOption = Annotated[
    str,
    typer.Option(
        metavar="NAME[:COUNT],...",
        help="H100, H100:4, L4:2, MI300X, ...; cpu is this machine. Of several, the first that "
        "does is planned, and why not those before it.",
    ),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="Of `octavo bench` (default: chat)."),
]
InputOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Instead of --workload: a prompt's mean, or quantiles: p50:600,p90:1500,max:4000.",
    ),
]
OutputOption = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Of an answer, told alike.")
]
ScaleOption = Annotated[str, typer.Option(metavar="NUMBER", help="Of all lengths, e.g. 1/16.")]
UsersOption = Annotated[
    float | None,
    typer.Option(
        "--users",
        "--concurrency",
        metavar="NUMBER",
        help="Requests in flight at the peak, each user's next one after the last (default: 1).",
        min=1,
        max=1e6,
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(metavar="FORMAT", help="bf16, fp8, int8, int4, Q4_K, ... (default: as stored)."),
]
KVOption = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="bf16, fp8 or int8 (default: 16 bits a value)."),
]


ShareOption = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Of a GPU's memory, for the engine; on a CPU of the free memory, for KV.",
        min=0.05,
        max=1.0,
    ),
]
RevisionOption = Annotated[str | None, typer.Option(metavar="REVISION", help="Of the hub.")]
TokenOption = Annotated[
    str | None,
    typer.Option(metavar="TOKEN", help="Of the hub.", envvar="HF_TOKEN", show_default=False),
]
