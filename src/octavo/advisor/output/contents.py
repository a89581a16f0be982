"""What is said of a plan, and in which order; the screen and Markdown show the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import octavo
from octavo.advisor.changes import Change
from octavo.advisor.estimate import NUM_DRAWS, Range
from octavo.advisor.load_test import WORKLOAD_FILE
from octavo.advisor.memory import GIB, Line, Memory
from octavo.advisor.plan import Plan
from octavo.advisor.verdict import Verdict
from octavo.simulator.cost_model import Provenance

TAGS: dict[Provenance, str] = {
    "specification": "spec",
    "measured": "measured",
    "fitted": "fitted",
    "prior": "prior",
}


@dataclass(frozen=True, slots=True)
class Table:
    """is_right: of each column, whether it is set flush right. wide: the column that takes what
    room there is on a screen, in several lines.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_right: tuple[bool, ...]
    wide: int


@dataclass(frozen=True, slots=True)
class Item:
    """A sentence with its beginning set apart; command: for a shell, under it; more: sentences that
    a screen leaves out.
    """

    lead: str
    text: str
    command: str = ""
    more: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """most_lines: on a screen, where what is left out is counted; None: all."""

    title: str
    body: Table | tuple[Item, ...]
    most_lines: int | None = None


def title(plan: Plan) -> str:
    question = plan.question
    weights = question.model.matrices.name
    return f"{question.model.name} ({weights}) on {plan.deployed.hardware}"


def subtitle(plan: Plan) -> str:
    traffic = plan.question.traffic
    lengths = traffic.lengths
    promise = plan.question.promise
    slo = "no SLO" if promise is None else str(promise)
    shared = f", {traffic.hit_rate:.0%} shared" if traffic.hit_rate else ""
    return (
        f"{traffic.workload.name}: {lengths.input_mean:,.0f} tokens in, {lengths.output_mean:,.0f} "
        f"out{shared}; {traffic.load_in_words}; {slo}"
    )


def verdict(plan: Plan) -> str:
    """One line."""
    chance = plan.prediction.chance if plan.prediction is not None else None
    sure = "" if chance is None else f" ({chance:.0%} of {NUM_DRAWS} draws keep it)"
    return f"{plan.verdict.value}{sure}: {plan.binding} [{TAGS[plan.judgement.provenance]}]"


def sections(plan: Plan) -> Iterator[Section]:
    if plan.prediction is not None:
        yield Section("What to expect", _predictions(plan))
    predicted = f"[{TAGS[plan.deployed.provenance]}]"
    if plan.changes:
        items = tuple(map(_change, plan.changes))
        yield Section(f"Nearest changes that would do {predicted}", items, most_lines=10)
    if plan.others:
        items = tuple(
            Item(str(hardware), f"{one.verdict.value}: {one.binding} [{TAGS[one.provenance]}]")
            for hardware, one in plan.others
        )
        yield Section("Other hardware that was asked for", items, most_lines=6)
    yield memory_section(plan.deployed.memory, str(plan.deployed.layout))
    yield Section(f"Layout {predicted}", _layouts(plan), most_lines=6)
    if plan.prediction is None:  # no value of a knob would make it fit
        yield Section("Engine, when it fits", _engines(plan), most_lines=21)
    else:
        yield Section("Engine", _engines(plan), most_lines=21)
        yield Section("Knobs [prior], and what raising each does", _knobs(plan))
    if plan.load_test is not None:
        file = "" if plan.question.traffic.option else f"; --out DIR writes {WORKLOAD_FILE}"
        title = f"Load test, with what it should show {predicted}{file}"
        yield Section(title, _steps(plan), most_lines=17)
    if plan.pitfalls:
        items = tuple(Item(f"{f.id} {f.verdict}", f.reason) for f in plan.pitfalls)
        yield Section("Pitfalls of this case", items, most_lines=9)
    items = tuple(Item("", text) for text in plan.assumptions)
    yield Section("Taken for granted", items, most_lines=5)


def closing(plan: Plan) -> str:
    return (
        f"octavo {octavo.__version__}; rules and their sources: octavo plan --explain ID; "
        "everything: --format md or json"
    )


def memory_section(memory: Memory, layout: str) -> Section:
    rows = tuple(_memory_row(line) for line in memory.lines)
    return Section(
        f"Memory of a device ({layout})",
        Table(("", "", "how", ""), rows, (False, True, False, False), wide=2),
    )


def _memory_row(line: Line) -> tuple[str, ...]:
    if line.unit == "bytes" and abs(line.value) >= 2**24:
        value = f"{line.value / GIB:,.2f} GiB"
    elif line.unit == "bytes" and line.value >= 2**22:
        value = f"{line.value / 2**20:,.1f} MiB"
    elif line.unit == "users" and line.value < 10:
        value = f"{line.value:.1f}"
    else:
        value = f"{line.value:,.0f}" + (" B" if line.unit == "bytes" else "")
    return line.label, value, line.how, f"[{TAGS[line.provenance]}]"


def _predictions(plan: Plan) -> Table:
    prediction = plan.prediction
    if prediction is None:
        return Table((), (), (), wide=0)
    tag = f"[{TAGS[prediction.provenance]}]"
    of_limit = {
        f"{limit.metric} p{100 * limit.q:g}": f"< {limit.limit_ms:g} ms"
        for limit in prediction.limits_ms
    }
    times = {
        f"{metric} {q}": prediction.times_ms[f"{metric}_{q}"]
        for metric in ("ttft", "tpot")
        for q in ("p50", "p99")
    }
    for limit, found in prediction.limits_ms.items():
        times.setdefault(f"{limit.metric} p{100 * limit.q:g}", found)
    rows = [
        (_upper(name), f"{digits(value.value)} ms", interval(value), of_limit.get(name, ""), tag)
        for name, value in times.items()
    ]
    rates = (("output tokens/s", prediction.output_rate), ("requests/s", prediction.request_rate))
    rows += [(name, digits(value.value), interval(value), "", tag) for name, value in rates]
    rows.append(("capacity", *_capacity(plan), tag))
    return Table(
        ("", "value", "90 % interval", "limit", ""),
        tuple(rows),
        (False, True, False, False, False),
        wide=2,
    )


def _change(change: Change) -> Item:
    command = f"; with {change.engine}:" if change.command else ""
    return Item(change.text, f"{change.effect}{command}", change.command)


def _capacity(plan: Plan) -> tuple[str, str, str]:
    unit = "users" if plan.question.traffic.users is not None else "requests/s"
    within = "within the SLO" if plan.question.promise is not None else "running at once"
    if not plan.capacity:
        return f"0 {unit}", within, ""
    need = plan.replicas_needed
    copies = "" if need <= 1 else f"{need} of the whole for this load"
    return f"{digits(plan.capacity)} {unit}", within, copies


def _layouts(plan: Plan) -> tuple[Item, ...]:
    unit = "users" if plan.question.traffic.users is not None else "requests/s"
    items = []
    for place, candidate in enumerate(plan.layouts):
        notes = "; ".join(f"{f.verdict}, {f.reason} ({f.id})" for f in candidate.findings)
        if candidate.is_rejected:
            text = f"no: {notes}"
        else:
            text = f"{digits(candidate.output_rate)} tokens/s at the load"
            if plan.question.promise is not None:
                text = f"{digits(candidate.capacity)} {unit} within the SLO, {text}"
            text += f"; {notes}" if notes else ""
        lead = str(candidate.layout)
        if place == 0:
            lead = f"nearest: {lead}" if candidate.is_rejected else f"chosen: {lead}"
        items.append(Item(lead, text))
    return tuple(items)


def _engines(plan: Plan) -> tuple[Item, ...]:
    items = []
    place = 0
    for choice in plan.engines:
        version = choice.engine.version.format(octavo_version=octavo.__version__)
        name = f"{choice.engine.name} {version}"
        reasons = "; ".join(f"{f.verdict} ({f.id})" for f in choice.reasons)
        more = " ".join([*(f.reason for f in choice.reasons), *choice.notes])
        if choice.points is None:
            items.append(Item(f"not {name}", reasons, more=more))
            continue
        place += 1
        tie = "; as good as the first: take what you run already" if choice.is_tied else ""
        items.append(Item(f"{place}. {name}", f"{reasons}{tie}", choice.command, more))
    items += [Item(f.verdict, f"{f.reason} ({f.id})") for f in plan.engine_notes]
    return tuple(items)


def _knobs(plan: Plan) -> Table:
    rows = tuple(
        (
            chosen.knob.name,
            chosen.chosen.value,
            chosen.knob.ttft,
            chosen.knob.tpot,
            chosen.knob.throughput,
            chosen.chosen.brief + (f" ({chosen.chosen.rule})" if chosen.chosen.rule else ""),
        )
        for chosen in plan.knobs
    )
    return Table(("", "value", "TTFT", "TPOT", "tokens/s", "why"), rows, (False,) * 6, wide=5)


def knob_reasons(plan: Plan) -> Iterator[Item]:
    """In whole sentences, for Markdown."""
    for chosen in plan.knobs:
        flags = ", ".join(f"{name} {flag}" for name, flag in chosen.knob.flags.items())
        yield Item(chosen.knob.name, chosen.chosen.why, more=flags and f"Flags: {flags}.")


def _steps(plan: Plan) -> tuple[Item, ...]:
    if plan.load_test is None:
        return ()
    return tuple(
        Item(step.name, step.expected, step.command, f"Otherwise: {step.reading}.")
        for step in plan.load_test.steps
    )


def ladder(plan: Plan) -> Table | None:
    """For Markdown: what to expect at rising users."""
    if plan.load_test is None:
        return None
    rows = tuple(
        (f"{r.users}", digits(r.output_rate), digits(r.ttft_ms), digits(r.tpot_ms))
        for r in plan.load_test.ladder
    )
    head = ("users", "tokens/s", "TTFT p50 ms", "TPOT p50 ms")
    return Table(head, rows, (True,) * 4, wide=0)


def is_bad(plan: Plan) -> bool:
    return plan.verdict in (Verdict.MISSES, Verdict.IMPOSSIBLE, Verdict.DOES_NOT_FIT)


def interval(value: Range) -> str:
    return f"{digits(value.low)} to {digits(value.high)}"


def digits(value: float) -> str:
    """Three that count: 4.77, 41.3, 411, 1,356."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _upper(name: str) -> str:
    metric, _, percentile = name.partition(" ")
    return f"{metric.upper()} {percentile}"
