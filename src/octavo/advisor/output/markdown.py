"""A plan in Markdown: all of it, nothing is cut."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.advisor.output import contents
from octavo.advisor.output.contents import Item, Section, Table
from octavo.advisor.plan import Plan


def plan_markdown(plan: Plan) -> str:
    lines = [f"# {contents.title(plan)}", "", contents.subtitle(plan), ""]
    lines += [f"**{contents.verdict(plan)}**", ""]
    for section in contents.sections(plan):
        lines += _section(section)
    if (ladder := contents.ladder(plan)) is not None:
        lines += ["## The curve to expect", "", *_table(ladder), "", _READING, ""]
    if plan.prediction is not None:
        lines += ["## The knobs, in sentences", ""]
        lines += [line for item in contents.knob_reasons(plan) for line in _item(item)]
        lines += ["", "## Commands for every engine", "", *_commands(plan)]
    lines += [contents.closing(plan), ""]
    return "\n".join(lines)


_READING = (
    "Output rises with users until steps are bound by arithmetic or memory is full; then it is "
    "flat, and each further user only waits. The knee N* is where both straight lines meet: "
    "output of one user times users, and the most output. Below it latency is nearly that of one "
    "user; from there on TPOT grows with users, and past the last place in the batch TTFT does."
)


def section_markdown(section: Section) -> str:
    return "\n".join(_section(section))


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    if isinstance(section.body, Table):
        yield from _table(section.body)
    else:
        for item in section.body:
            yield from _item(item)
    yield ""


def _item(item: Item) -> Iterator[str]:
    lead = f"**{item.lead}**" if item.lead else ""
    text = ": ".join(part for part in (lead, item.text) if part)
    yield f"* {text}" + (f". {item.more}" if item.more else "")
    if item.command:
        yield from ("", "  ```bash", f"  {item.command}", "  ```", "")


def _table(table: Table) -> Iterator[str]:
    yield _row(table.head)
    yield _row(tuple("--:" if right else "---" for right in table.is_right))
    for row in table.rows:
        yield _row(row)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _commands(plan: Plan) -> Iterator[str]:
    for choice in plan.engines:
        engine = choice.engine
        excluded = " (excluded above)" if choice.points is None else ""
        yield f"{engine.name}{excluded}, flags as of {engine.as_of}, {engine.source}:"
        yield from ("", "```bash", choice.command, "```", "")
        for note in choice.notes:
            yield from (f"{note}.", "")
