"""report.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.bench.output.contents import Table, facts_of, tables_of
from octavo.bench.output.plots import Picture
from octavo.bench.output.run import Run
from octavo.bench.output.text import checks_in_words, count_checks, printable, title

_SPECIAL = re.compile(r"([\\`*_\[\]<>#!|~&$])")


def markdown(run: Run, pictures: Sequence[Picture]) -> str:
    parts = [f"# {_text(title(run))}", f"**{_text(count_checks(run))}**"]
    parts += [_bullets([*checks_in_words(run), *run.notes])]
    parts += [_bullets([finding.sentence for finding in run.findings])]
    parts += [f"![{_text(picture.caption)}]({picture.name}.png)" for picture in pictures]
    parts += [_table(table) for table in tables_of(run)]
    parts += ["## Where and how", _bullets([f"{name}: {value}" for name, value in facts_of(run)])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: Table) -> str:
    lines = [f"## {_text(table.title)}", ""]
    lines += [_row(table.columns), _row(["---"] * len(table.columns), is_text=False)]
    lines += [_row(row) for row in table.rows]
    if table.note:
        lines += ["", _text(table.note)]
    return "\n".join(lines)


def _row(cells: Sequence[str], *, is_text: bool = True) -> str:
    return f"| {' | '.join(map(_text, cells) if is_text else cells)} |"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_text(line)}" for line in lines)


def _text(text: str) -> str:
    """On one line, with nothing in it that Markdown or HTML would read as their own."""
    return _SPECIAL.sub(r"\\\1", printable(" ".join(text.split())))
