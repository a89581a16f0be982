"""How `--help` looks: options under their sections, the text under each one.

Typer's own tables cut long flag names off in a terminal of 80 columns.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

_TEXT_INDENT = 4


class Verb(TyperCommand):
    """A command of `octavo`."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Without the name of the first verb of `VerbWithOthers`, which nobody types."""
        shown = ctx
        if isinstance(ctx.parent.command, VerbWithOthers) and ctx.parent.info_name == ctx.info_name:
            shown = ctx.parent
        formatter.write_usage(shown.command_path, " ".join(self.collect_usage_pieces(ctx)))

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


class VerbWithOthers(TyperGroup):
    """Verbs under the name of the first: `octavo plan MODEL` and `octavo plan verify`. What names
    none of them is for the first.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next(iter(self.commands))
        given = args if args and args[0] in self.commands else [first, *args]
        parsed: list[str] = super().parse_args(ctx, given)
        return parsed
