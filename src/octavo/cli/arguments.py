"""What several verbs take."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.settings import Flags, load_config
from octavo.config import Config

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="`default` (SmolLM2-135M-Instruct), a folder, a .gguf file or a hub id org/name.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]

# What only matters where several clients meet.
FOR_SERVERS = ("served_model_name", "max_logprobs", "scheduling_policy", "max_num_queued_reqs")


def configuration(flags: Flags, model: str | None = None) -> Config:
    """From all sources. Variables that look like settings and are none are warned of."""
    return load_config(
        flags, model=model, warn=lambda message: print(f"warning: {message}", file=sys.stderr)
    )
