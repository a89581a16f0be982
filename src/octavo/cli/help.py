"""How `--help` looks: options under their sections, the text under each one.

Typer's own tables cut long flag names off in a terminal of 80 columns.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_TEXT_INDENT = 4


class Verb(TyperCommand):
    """A command of `octavo`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                name, text = record
                record = re.sub(r" <.*>$", "", name), text  # a type's name in Python is no help
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None)
                title = "Arguments" if is_argument else panel or "Options"
                sections.setdefault(title, []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_TEXT_INDENT)
