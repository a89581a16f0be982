"""The SLO of a plan: bench's grammar, and the shorter way in which people write one.

    ttft<500ms, p99 tpot<50ms

A limit without a percentile is taken at its word, of (nearly) every request: p99.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.bench.slo import Slo, parse_slo
from octavo.core.errors import ConfigError

_PLANNED = ("ttft", "tpot", "e2e")
_PREFIXED = re.compile(r"p(\d+(?:\.\d+)?)\s+(\w+)\s*(<.*)")
_BARE = re.compile(r"(ttft|tpot|e2e)\s*(<.*)")


@dataclass(frozen=True, slots=True)
class Limit:
    """metric: ttft, tpot or e2e. q: of the percentile that must keep it."""

    metric: str
    limit_ms: float
    q: float

    def __str__(self) -> str:
        return f"{self.metric.upper()} p{100 * self.q:g} < {self.limit_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Promise:
    """slo: as bench judges it. limits: what each metric must keep at the least. notes: how it was
    read, where that is not as it was written.
    """

    slo: Slo
    limits: tuple[Limit, ...]
    notes: tuple[str, ...] = ()

    def limit(self, metric: str) -> Limit | None:
        """The strictest of a metric."""
        found = [limit for limit in self.limits if limit.metric == metric]
        return min(found, key=lambda limit: limit.limit_ms, default=None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))


def read_promise(text: str) -> Promise:
    """Raises ConfigError."""
    notes: list[str] = []
    stripped = text.strip().lower()
    if stripped.startswith("attain") or ("<" not in stripped and ":" in stripped):
        slo = parse_slo(text)
    else:
        slo = parse_slo(",".join(_term(part, notes) for part in stripped.split(",")))
    share = slo.share
    if slo.share is None and any(term.q is None for term in slo.terms):
        share = 0.99
        notes.append("limits without a share are taken for 99 % of requests")
    for term in slo.terms:
        if term.metric not in _PLANNED:
            raise ConfigError(
                f"the SLO {text!r} has a limit on {term.metric}; a plan predicts "
                f"{', '.join(_PLANNED)}: leave it out here, and measure it with octavo bench"
            )
    limits = tuple(
        Limit(term.metric, term.limit_ms, term.q if term.q is not None else share or 0.99)
        for term in slo.terms
    )
    return Promise(slo, limits, tuple(notes))


def _term(part: str, notes: list[str]) -> str:
    """In bench's grammar."""
    part = part.strip()
    if match := _PREFIXED.fullmatch(part):
        return f"{match[2]}_p{match[1]}{match[3]}"
    if match := _BARE.fullmatch(part):
        notes.append(f"{match[1].upper()} has no percentile in the SLO: taken as p99")
        return f"{match[1]}_p99{match[2]}"
    return part
