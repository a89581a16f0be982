"""Service-level objectives: what they say, which requests meet them, and whether a run does.

Two forms, which ask different things:

    ttft_p99<500ms, tpot_p99<50ms                 each percentile on its own
    attain(ttft<500ms & tpot<50ms) >= 0.95        a share of requests that meet all limits at once

Two p99 limits that hold separately allow 2 % of requests to miss one or the other. vLLM's goodput
form, `ttft:500 tpot:50` (ms), gives limits for each request but promises no share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from octavo.bench.metrics import METRICS
from octavo.bench.points import Estimate
from octavo.bench.records import Failure, RequestRecord
from octavo.bench.statistics import can_tell, effective_size, percentile, wilson
from octavo.core.errors import ConfigError

_EXAMPLE = (
    "write ttft_p99<500ms, tpot_p99<50ms or attain(ttft<500ms & tpot<50ms) >= 0.95 "
    "or ttft:500 tpot:50"
)
_ALIASES = {"e2el": "e2e"}  # vLLM's name
_NAMES = tuple(metric.name for metric in METRICS.values() if metric.unit == "ms")
_MS_OF = {"ms": 1.0, "s": 1000.0}
_LIMIT = re.compile(r"([a-z0-9_.]+)\s*<=?\s*([0-9.]+)\s*([a-z]*)")
_ATTAIN = re.compile(r"attain\s*\((.*)\)\s*>=?\s*([0-9.]+)\s*(%?)")
_PERCENTILE = re.compile(r"(.+)_p([0-9.]+)")
_FIRST_TOKEN = {"ttft": "e2e", "ttft_send": "e2e_send"}


@dataclass(frozen=True)
class Term:
    """One limit, inclusive. q: of the percentile that must keep it; None if each request must."""

    metric: str
    limit_ms: float
    q: float | None = None

    def __str__(self) -> str:
        percent = "" if self.q is None else f"_p{100 * self.q:g}"
        return f"{self.metric}{percent}<{self.limit_ms:g}ms"

    def is_met_by(self, record: RequestRecord) -> bool:
        """Whether a request that succeeded kept the limit. Of a pooled metric, its own percentile
        counts, or where each request must, the largest value. Without a value (the TPOT of one
        token) there is nothing to miss; but the end of an empty answer counts as its first token.
        """
        values = METRICS[self.metric].values(record)
        if not values and self.metric in _FIRST_TOKEN:
            values = METRICS[_FIRST_TOKEN[self.metric]].values(record)
        return not values or percentile(values, self.q or 1.0) <= self.limit_ms


@dataclass(frozen=True)
class TermVerdict:
    """value: the percentile, with failed requests as infinitely slow; None if each request must
    meet the term or the sample can't carry it. num_missed: requests that missed this term, failed
    ones included. is_met: None where that can't be told.
    """

    term: Term
    value: float | None
    num_missed: int
    is_met: bool | None


@dataclass(frozen=True)
class SloVerdict:
    """Of a run. count: its requests but cancelled ones; num_good: those that met all limits.
    attainment: num_good / count. binding: the term nearest to its limit, or furthest beyond it; of
    the joint form, the one that most requests missed, None if none did. is_met: None where the
    sample can't tell, and in the goodput form.
    """

    count: int
    num_good: int
    attainment: Estimate | None
    terms: tuple[TermVerdict, ...]
    binding: Term | None
    is_met: bool | None


@dataclass(frozen=True)
class Slo:
    """share: of requests that must meet all terms at once; None in the other two forms."""

    text: str
    terms: tuple[Term, ...]
    share: float | None = None

    def is_met_by(self, record: RequestRecord) -> bool | None:
        """One request's verdict on all limits together, which goodput and attainment count in each
        form: a percentile's limit is then taken as the request's own. A failed request, one that
        timed out or was cut short misses; None if it was cancelled.
        """
        if record.failure is Failure.CANCELLED:
            return None
        return record.is_ok and all(term.is_met_by(record) for term in self.terms)

    def judge(self, records: Sequence[RequestRecord]) -> SloVerdict:
        """records: in the order in which they were due."""
        counted = [record for record in records if record.failure is not Failure.CANCELLED]
        met = [bool(self.is_met_by(record)) for record in counted]
        attainment = None
        if counted:
            attainment = wilson(sum(met), len(met), _effective_size_of_shares(met, counted))
        terms = tuple(_term_verdict(term, counted) for term in self.terms)
        return SloVerdict(
            count=len(counted),
            num_good=sum(met),
            attainment=attainment,
            terms=terms,
            binding=_binding(terms, counted),
            is_met=self._is_met(attainment, terms),
        )

    def _is_met(self, attainment: Estimate | None, terms: tuple[TermVerdict, ...]) -> bool | None:
        if self.share is not None:
            return None if attainment is None else attainment.value >= self.share
        verdicts = [term.is_met for term in terms]
        if False in verdicts:
            return False
        return None if None in verdicts else True


def parse_slo(text: str) -> Slo:
    """Either form of the grammar, or vLLM's goodput form. Raises ConfigError, naming the part."""
    stripped = text.strip().lower()
    if stripped.startswith("attain"):
        return _parse_joint(text, stripped)
    if "<" not in stripped and ":" in stripped:
        return Slo(text, _distinct(text, [_goodput_term(text, part) for part in stripped.split()]))
    terms = [_term(text, part.strip(), has_percentile=True) for part in stripped.split(",")]
    return Slo(text, _distinct(text, terms))


def _parse_joint(text: str, stripped: str) -> Slo:
    match = _ATTAIN.fullmatch(stripped)
    if match is None:
        raise _wrong(text, stripped, "attain(...) must be closed and followed by >= and a share")
    terms, number, percent = match.groups()
    share = _number(text, number) / (100 if percent else 1)
    if not 0 < share <= 1:
        raise _wrong(text, number + percent, "the share must be above 0 and at most 1 (or 100%)")
    return Slo(
        text,
        _distinct(
            text,
            [_term(text, part.strip(), has_percentile=False) for part in terms.split("&")],
        ),
        share,
    )


def _term(text: str, part: str, *, has_percentile: bool) -> Term:
    match = _LIMIT.fullmatch(part)
    if match is None:
        raise _wrong(text, part, "a term is a metric, < and a limit with its unit")
    name, number, unit = match.groups()
    q = None
    if percent := _PERCENTILE.fullmatch(name):
        if not has_percentile:
            raise _wrong(text, name, "inside attain(...) each request counts, without a percentile")
        name = percent[1]
        q = round(_number(text, percent[2]) / 100, 9)
        if not 0 < q < 1:
            raise _wrong(text, part, "a percentile lies between 0 and 100")
    elif has_percentile:
        _metric(text, name)  # a name that is none needs no percentile
        raise _wrong(text, name, f"say which percentile: {name}_p99, or attain({part}) >= 0.95")
    if unit not in _MS_OF:
        raise _wrong(text, part, f"the limit needs a unit, ms or s: {number}ms")
    return Term(_metric(text, name), _limit(text, number) * _MS_OF[unit], q)


def _goodput_term(text: str, part: str) -> Term:
    name, colon, number = part.partition(":")
    if not colon:
        raise _wrong(
            text, part, "a limit of the goodput form is a metric, a colon and milliseconds"
        )
    return Term(_metric(text, name), _limit(text, number))


def _metric(text: str, name: str) -> str:
    name = _ALIASES.get(name, name)
    if name in _NAMES:
        return name
    near = get_close_matches(name, _NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the metrics are {', '.join(_NAMES)}"
    raise _wrong(text, name, f"there is no such metric; {hint}")


def _limit(text: str, number: str) -> float:
    limit = _number(text, number)
    if limit <= 0:
        raise _wrong(text, number, "a limit is above 0")
    return limit


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise _wrong(text, number, "this is no number") from None


def _distinct(text: str, terms: Sequence[Term]) -> tuple[Term, ...]:
    seen = set()
    for term in terms:
        if (term.metric, term.q) in seen:
            raise _wrong(text, str(term), "each quantity has one limit")
        seen.add((term.metric, term.q))
    return tuple(terms)


def _wrong(text: str, part: str, reason: str) -> ConfigError:
    return ConfigError(f"the SLO {text!r} can't be read at {part!r}: {reason}; {_EXAMPLE}")


def _term_verdict(term: Term, counted: Sequence[RequestRecord]) -> TermVerdict:
    missed = [not (record.is_ok and term.is_met_by(record)) for record in counted]
    num_missed = sum(missed)
    if term.q is None or not counted:
        return TermVerdict(term, None, num_missed, None)
    sample = METRICS[term.metric].sample(counted)
    share_ok = sum(record.is_ok for record in counted) / len(counted)
    if share_ok < term.q:
        return TermVerdict(term, float("inf"), num_missed, False)
    if len(sample) == 0:
        return TermVerdict(term, None, num_missed, None)
    if can_tell(term.q, effective_size(sample)) or term.q <= 0.5:
        # With failures as the slowest, the percentile lies higher among those that succeeded.
        value = percentile(sample, term.q / share_ok)
        return TermVerdict(term, value, num_missed, value <= term.limit_ms)
    # Too few to know the percentile, but perhaps enough to know that too many are beyond it.
    num_within = int((sample <= term.limit_ms).sum())
    share = wilson(num_within, len(sample), effective_size(sample))
    is_missed = share.high is not None and share.high * share_ok < term.q
    return TermVerdict(term, None, num_missed, False if is_missed else None)


def _binding(terms: Iterable[TermVerdict], counted: Sequence[RequestRecord]) -> Term | None:
    """Compared by percentile over limit where all are known, else by the requests that missed."""
    found = list(terms)
    if all(verdict.value is not None for verdict in found):
        return max(found, key=lambda v: (v.value or 0.0) / v.term.limit_ms).term
    most = max(found, key=lambda v: v.num_missed)
    return most.term if most.num_missed else None


def _effective_size_of_shares(met: Sequence[bool], counted: Sequence[RequestRecord]) -> float:
    """Of the verdicts in time. If all are alike they don't show how they depend on each other: then
    as their end-to-end latencies do.
    """
    if any(met) and not all(met):
        return effective_size([float(one) for one in met])
    latencies = METRICS["e2e"].sample(counted)
    if len(latencies) == 0:
        return float(len(met))
    return effective_size(latencies) / len(latencies) * len(met)
