"""The sampling flags of `generate` and `chat`, derived from `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import typer

from octavo.cli.settings import collect_options, optional
from octavo.core.sampling_params import SamplingParams

Sampling = dict[str, Any]
"""What was given: SamplingParams fields. The model's own defaults apply to the others."""

_FLAGS = {
    "max_tokens": "Tokens to generate at most.",
    "temperature": "0 always takes the likeliest token.",
    "top_p": "Choose among the likeliest tokens that have this probability together.",
    "top_k": "Choose among this many likeliest tokens; 0: all.",
    "min_p": "Leave out tokens less likely than this share of the likeliest.",
    "presence_penalty": "Disfavour tokens that the answer has already.",
    "frequency_penalty": "Disfavour tokens by how often the answer has them.",
    "repetition_penalty": "Divide the logits of tokens seen in prompt or answer by this.",
    "seed": "Makes the answer reproducible.",
    "stop": "End the answer before this text; may be repeated.",
}


def takes_sampling(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the sampling flags; its parameter `sampling` gets what was given."""
    hints = get_type_hints(SamplingParams)
    options = [
        optional(
            name,
            kind := list[str] if name == "stop" else _number(hints[name]),
            typer.Option(
                f"--{name.replace('_', '-')}",
                metavar={int: "INT", float: "FLOAT"}.get(kind, "TEXT"),
                help=text,
                show_default=False,
                rich_help_panel="Sampling",
            ),
        )
        for name, text in _FLAGS.items()
    ]
    return collect_options(verb, options, into="sampling")


def _number(hint: Any) -> type:
    """int for `int | None`, float for `float`."""
    return int if int in (hint, *get_args(hint)) else float
