"""A plan on at most two screens: 96 lines of 100 columns, in a terminal or a pipe."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

from octavo.advisor.output import contents
from octavo.advisor.output.contents import Item, Section, Table
from octavo.advisor.plan import Plan

WIDTH = 100
MOST_LINES = 96
_GAP = "  "
_LEAST_WIDE = 16
"""Columns that a table's widest column has at least; what is longer goes on below."""


def show_plan(plan: Plan, *, file: IO[str] | None = None) -> None:
    console = Console(file=file or sys.stdout, width=WIDTH, highlight=False)
    for line in plan_lines(plan):
        console.print(line, no_wrap=True, overflow="ellipsis")


def show_section(section: Section, *, file: IO[str] | None = None) -> None:
    console = Console(file=file or sys.stdout, width=WIDTH, highlight=False)
    for line in _section(section):
        console.print(line, no_wrap=True, overflow="ellipsis")


def plan_lines(plan: Plan) -> list[Text]:
    """All of them fit; a test holds that for every scenario."""
    colour = (
        "bold green" if plan.is_good else "bold red" if contents.is_bad(plan) else "bold yellow"
    )
    lines = [Text(contents.title(plan), style="bold")]
    lines += _wrapped(contents.subtitle(plan), "")
    lines += _wrapped(contents.verdict(plan), "", style=colour)
    body = list(contents.sections(plan))
    found = [list(_section(section)) for section in body]
    room = MOST_LINES - len(lines) - 1
    # What is too much is taken from the longest part of sentences, a line at a time.
    while sum(map(len, found)) > room:
        longest = max(
            (i for i, section in enumerate(body) if isinstance(section.body, tuple)),
            key=lambda i: len(found[i]),
        )
        found[longest] = list(_section(body[longest], most=len(found[longest]) - 2))
    lines += [line for part in found for line in part]
    lines.append(Text(contents.closing(plan), style="dim"))
    return lines


def _section(section: Section, most: int | None = None) -> Iterator[Text]:
    yield Text(section.title, style="bold cyan")
    if isinstance(section.body, Table):
        yield from _table(section.body)
    else:
        yield from _items(section.body, most if most is not None else section.most_lines)


def _items(items: Sequence[Item], most: int | None) -> Iterator[Text]:
    """Whole items as long as there is room; then how many more there are."""
    blocks = [list(_item(item)) for item in items]
    used = 0
    for place, block in enumerate(blocks):
        is_last = place + 1 == len(blocks)
        if most is not None and used + len(block) > most - (not is_last):
            names = ", ".join(item.lead for item in items[place:] if item.lead)
            rest = f"… {len(blocks) - place} more in --format md" + (f": {names}" if names else "")
            yield Text("  " + textwrap.shorten(rest, WIDTH - 2, placeholder=" …"), style="dim")
            return
        used += len(block)
        yield from block


def _item(item: Item) -> Iterator[Text]:
    text = f"{item.lead}: {item.text}" if item.lead and item.text else item.lead or item.text
    lines = _wrapped(text, "  ", indent_more="    ")
    if item.lead and lines:
        lines[0].stylize("bold", 2, min(2 + len(item.lead), len(lines[0])))
    yield from lines
    if item.command:
        wrapped = _command_lines(item.command)
        for place, words in enumerate(wrapped):
            end = " \\" if place + 1 < len(wrapped) else ""
            yield Text(f"    {words}{end}", style="green")


def _command_lines(command: str) -> list[str]:
    """Broken before flags, so that a flag and its value stay together."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        joined = f"{lines[-1]} {part}".strip()
        if lines[-1] and len(joined) > WIDTH - 8:
            lines.append(f"  {part}")
        else:
            lines[-1] = joined if len(lines) == 1 else f"  {joined}"
    return lines


def _table(table: Table) -> Iterator[Text]:
    head = [table.head] if any(table.head) else []
    rows = [*head, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.head))]
    long = table.wide
    others = sum(w for i, w in enumerate(widths) if i != long) + len(_GAP) * len(widths)
    widths[long] = min(widths[long], max(_LEAST_WIDE, WIDTH - others))
    for place, row in enumerate(rows):
        style = "dim" if head and place == 0 else ""
        parts = textwrap.wrap(row[long], widths[long], break_on_hyphens=False) or [""]
        for number, part in enumerate(parts):
            cells = [
                part if i == long else cell if number == 0 else "" for i, cell in enumerate(row)
            ]
            yield Text(_GAP + _line(cells, widths, table.is_right), style=style)


def _line(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_right, strict=True)
    )
    return _GAP.join(padded).rstrip()


def _wrapped(words: str, indent: str, *, indent_more: str = "", style: str = "") -> list[Text]:
    lines = textwrap.wrap(
        words, WIDTH, initial_indent=indent, subsequent_indent=indent_more, break_on_hyphens=False
    )
    return [Text(line, style=style) for line in lines]
