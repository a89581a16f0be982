"""What several verbs take."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.settings import Flags, load_config
from octavo.config import Config
from octavo.core.errors import ConfigError

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


def number(flag: str, text: str) -> float:
    """Of 2, 0.25 or 1/16. Raises ConfigError."""
    above, _, below = text.partition("/")
    try:
        value = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not 0 < value < 1e9:
        too_much = ": it is below 1e9" if value >= 1e9 else ""
        raise ConfigError(
            f"{flag} must be a number above 0, such as 2, 0.25 or 1/16, got {text!r}{too_much}"
        )
    return value


def whole_numbers(flag: str, text: str) -> list[int]:
    """Of a list like 1,2,4. Raises ConfigError."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise ConfigError(f"{flag} must be whole numbers from 1, separated by commas, got {text!r}")
    return numbers
