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
    return document(
        title=title(run),
        verdict=count_checks(run),
        reasons=[*checks_in_words(run), *run.notes],
        findings=[finding.sentence for finding in run.findings],
        pictures=pictures,
        tables=tables_of(run),
        facts=facts_of(run),
    )


def document(
    *,
    title: str,
    verdict: str,
    reasons: Sequence[str],
    findings: Sequence[str],
    pictures: Sequence[Picture],
    tables: Sequence[Table],
    facts: Sequence[tuple[str, str]],
) -> str:
    """The same parts as those of html.py's document."""
    parts = [f"# {_text(title)}", f"**{_text(verdict)}**", _bullets(reasons), _bullets(findings)]
    parts += [f"![{_text(picture.caption)}]({picture.name}.png)" for picture in pictures]
    parts += [_table(table) for table in tables]
    parts += ["## Where and how", _bullets([f"{name}: {value}" for name, value in facts])]
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
