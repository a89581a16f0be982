"""Which engine, and how it is started: points and exclusions by rules, commands from templates."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from string import Formatter
from typing import Any

import octavo
from octavo.advisor.conditions import Condition, Value
from octavo.advisor.data import read_yaml
from octavo.advisor.facts import Facts
from octavo.advisor.rules import EXCLUDE, Finding, Kind, matching
from octavo.core.errors import InvariantError
from octavo.weights.source import DEFAULT

_ALWAYS = Condition("True")


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What commands are made of. memory_share: of a device, for all that the engine holds;
    static_share: for weights and KV alone; free_share: of what everything but KV leaves free, for
    KV. All three say the same. num_queued: requests that may wait. speculates: "ngram", "head" or
    "off". The rest as in Facts and Settings.
    """

    model: str
    tp: int
    pp: int
    num_devices: int
    is_gpu: bool
    is_moe: bool
    is_gguf: bool
    is_quantized_checkpoint: bool
    weight_format: str
    kv_format: str
    memory_share: float
    static_share: float
    free_share: float
    max_model_len: int
    num_seqs: int
    token_budget: int
    num_queued: int
    speculates: str
    octavo_version: str = octavo.__version__

    def as_dict(self) -> dict[str, Value]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


_NAMES = frozenset(field.name for field in fields(LaunchFacts))


@dataclass(frozen=True, slots=True)
class _Part:
    """Words of a command, or a note, that are there if a condition holds."""

    text: str
    when: Condition

    @classmethod
    def read(cls, entry: str | Mapping[str, str]) -> _Part:
        if isinstance(entry, str):
            return cls(entry, _ALWAYS)
        part = cls(entry["text"], Condition(entry["when"]) if "when" in entry else _ALWAYS)
        asked = {name for _, name, _, _ in Formatter().parse(part.text) if name}
        if unknown := (asked | part.when.names) - _NAMES:
            raise InvariantError(f"engines.yaml asks for unknown facts {', '.join(unknown)}")
        return part


@dataclass(frozen=True, slots=True)
class Engine:
    """As in data/engines.yaml."""

    id: str
    name: str
    version: str
    as_of: str
    source: str
    url: str
    arguments: tuple[_Part, ...]
    notes: tuple[_Part, ...]

    def command(self, facts: LaunchFacts) -> str:
        """One line for a shell. What Octavo calls the default model, no other engine knows."""
        is_known = facts.model != DEFAULT or self.id == "octavo"
        values = facts.as_dict() | {"model": shlex.quote(facts.model) if is_known else "MODEL"}
        shown = (part.text for part in self.arguments if part.when.holds(values))
        return " ".join(text.format_map(values) for text in shown)

    def notes_for(self, facts: LaunchFacts) -> tuple[str, ...]:
        values = facts.as_dict()
        return tuple(p.text.format_map(values) for p in self.notes if p.when.holds(values))


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """points: None if rules exclude it. reasons: that spoke for or against it. command: empty for
    a deployment that can't be started. is_tied: with the
    first, so that what one runs already decides.
    """

    engine: Engine
    points: int | None
    reasons: tuple[Finding, ...]
    command: str
    notes: tuple[str, ...]
    is_tied: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine.id,
            "name": self.engine.name,
            "version": self.engine.version.format(octavo_version=octavo.__version__),
            "as_of": self.engine.as_of,
            "source": self.engine.source,
            "excluded": self.points is None,
            "points": self.points,
            "tied_with_first": self.is_tied,
            "reasons": [finding.to_json() for finding in self.reasons],
            "command": self.command or None,
            "notes": list(self.notes),
        }


@cache
def engines() -> Mapping[str, Engine]:
    """By id."""
    return {
        name: Engine(
            id=name,
            name=entry["name"],
            version=str(entry["version"]),
            as_of=str(entry["as_of"]),
            source=entry["source"],
            url=entry["url"],
            arguments=tuple(map(_Part.read, entry["arguments"])),
            notes=tuple(map(_Part.read, entry["notes"])),
        )
        for name, entry in read_yaml("engines.yaml").items()
    }


def choose_engines(facts: Facts, launch: LaunchFacts | None) -> list[EngineChoice]:
    """All engines, best first, excluded ones last. Those within a point of the first are tied: what
    engines are ahead of each other by is less than what a version changes. launch: None gives no
    commands.
    """
    points: dict[str, int | None] = dict.fromkeys(engines(), 0)
    reasons: dict[str, list[Finding]] = {name: [] for name in engines()}
    for finding in matching(Kind.ENGINE, facts.as_dict()):
        if not isinstance(finding.rule.effect, Mapping):
            raise InvariantError(f"engine rule {finding.id} has no effect")
        for name, effect in finding.rule.effect.items():
            reasons[name].append(finding)
            before = points[name]
            if effect == EXCLUDE:
                points[name] = None
            elif before is not None:
                points[name] = before + int(effect)
    ranked = sorted(engines(), key=lambda name: _rank(points[name]))
    best = points[ranked[0]]
    choices = []
    for place, name in enumerate(ranked):
        engine, own = engines()[name], points[name]
        is_tied = place > 0 and own is not None and best is not None and own >= best - 1
        # Reasons to be left out hide those that would have spoken for it.
        told = [f for f in reasons[name] if own is not None or _excludes(f, name)]
        choices.append(
            EngineChoice(
                engine,
                own,
                tuple(told),
                engine.command(launch) if launch is not None else "",
                engine.notes_for(launch) if launch is not None else (),
                is_tied,
            )
        )
    return choices


def general_findings(facts: Facts) -> list[Finding]:
    """Of engine rules that favour none."""
    return [f for f in matching(Kind.ENGINE, facts.as_dict()) if not f.rule.effect]


def _rank(points: int | None) -> tuple[bool, int]:
    return points is None, -(points or 0)


def _excludes(finding: Finding, name: str) -> bool:
    effect = finding.rule.effect
    return isinstance(effect, Mapping) and effect.get(name) == EXCLUDE
