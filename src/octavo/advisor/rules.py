"""Decision rules: read from `data/rules.yaml`, checked, and matched against a case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from string import Formatter
from typing import Any

from octavo.advisor import facts
from octavo.advisor.conditions import Condition, Value
from octavo.advisor.data import read_yaml
from octavo.core.errors import ConfigError, InvariantError

EXCLUDE = "exclude"
REJECT, NOTE = "reject", "note"
_FIELDS = {"id", "kind", "when", "verdict", "reason", "source", "as_of", "confidence"}


class Kind(StrEnum):
    ENGINE = "engine"
    LAYOUT = "layout"
    FEATURE = "feature"
    PITFALL = "pitfall"


_VOCABULARY: Mapping[Kind, frozenset[str]] = {
    Kind.ENGINE: facts.NAMES,
    Kind.LAYOUT: facts.LAYOUT_NAMES,
    Kind.FEATURE: facts.NAMES,
    Kind.PITFALL: facts.NAMES,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """effect: of engine rules, points by engine, or EXCLUDE; of layout rules REJECT or NOTE; of the
    others nothing. The rest is as in the file.
    """

    id: str
    kind: Kind
    when: Condition
    verdict: str
    reason: str
    source: str
    as_of: str
    confidence: str
    effect: Mapping[str, int | str] | str | None

    def explained(self) -> str:
        """All of it, for `--explain`."""
        lines = [f"{self.id} ({self.kind}): {self.verdict}", f"when: {self.when.text}"]
        if isinstance(self.effect, Mapping) and self.effect:
            lines.append("effect: " + ", ".join(f"{k} {v}" for k, v in self.effect.items()))
        elif isinstance(self.effect, str):
            lines.append(f"effect: {self.effect}")
        lines += [f"reason: {self.reason}", f"source: {self.source}"]
        return "\n".join([*lines, f"read: {self.as_of}; confidence: {self.confidence}"])


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds, its sentences with the case's values in them."""

    rule: Rule
    verdict: str
    reason: str

    @property
    def id(self) -> str:
        return self.rule.id

    def to_json(self) -> dict[str, str]:
        return {
            "rule": self.id,
            "verdict": self.verdict,
            "reason": self.reason,
            "source": self.rule.source,
            "as_of": self.rule.as_of,
            "confidence": self.rule.confidence,
        }


@cache
def rules() -> tuple[Rule, ...]:
    """Raises InvariantError for a rule that can't be used: they come with the package."""
    found = tuple(map(_rule, read_yaml("rules.yaml")))
    ids = [rule.id for rule in found]
    if len(set(ids)) < len(ids):
        raise InvariantError("two rules have the same id")
    return found


def rule_named(name: str) -> Rule:
    """Raises ConfigError."""
    by_id = {rule.id.lower(): rule for rule in rules()}
    if name.lower() in by_id:
        return by_id[name.lower()]
    near = get_close_matches(name.upper(), [rule.id for rule in rules()], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"there is no rule {name!r}; {meant}There are {', '.join(rule.id for rule in rules())}"
    )


def matching(kind: Kind, case: Mapping[str, Value]) -> list[Finding]:
    """The rules of a kind that hold, in the file's order."""
    return list(_matching(kind, case))


def _matching(kind: Kind, case: Mapping[str, Value]) -> Iterator[Finding]:
    for rule in rules():
        if rule.kind is kind and rule.when.holds(case):
            yield Finding(rule, rule.verdict.format_map(case), rule.reason.format_map(case))


def _rule(entry: Mapping[str, Any]) -> Rule:
    name = entry.get("id")
    if missing := _FIELDS - entry.keys():
        raise InvariantError(f"rule {name} lacks {', '.join(sorted(missing))}")
    if unknown := entry.keys() - _FIELDS - {"effect"}:
        raise InvariantError(f"rule {name} has unknown fields {', '.join(sorted(unknown))}")
    rule = Rule(
        id=entry["id"],
        kind=Kind(entry["kind"]),
        when=Condition(entry["when"]),
        verdict=entry["verdict"].strip(),
        reason=entry["reason"].strip(),
        source=entry["source"],
        as_of=str(entry["as_of"]),
        confidence=entry["confidence"],
        effect=entry.get("effect"),
    )
    _check(rule)
    return rule


def _check(rule: Rule) -> None:
    in_sentences = {
        name
        for text in (rule.verdict, rule.reason)
        for _, name, _, _ in Formatter().parse(text)
        if name is not None
    }
    if unknown := (rule.when.names | in_sentences) - _VOCABULARY[rule.kind]:
        raise InvariantError(f"rule {rule.id} asks for unknown facts {', '.join(sorted(unknown))}")
    is_fitting = {
        Kind.ENGINE: isinstance(rule.effect, dict),
        Kind.LAYOUT: rule.effect in (REJECT, NOTE),
    }.get(rule.kind, rule.effect is None)
    if not is_fitting:
        raise InvariantError(f"rule {rule.id} has effect {rule.effect!r}, which {rule.kind} lacks")
    if rule.confidence not in ("high", "medium", "low"):
        raise InvariantError(f"rule {rule.id} has confidence {rule.confidence!r}")
