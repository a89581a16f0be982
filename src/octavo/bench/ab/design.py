"""The paired design: what is played in which order, and what may be concluded from it.

All arms get the same requests with the same arrival times, so that what the load does by chance is
in all of them alike. A round plays each arm once; every second round in reverse, so that a machine
that gets slower over time favours nobody (A B B A). Each play has a server of its own: what a start
happens to do, e.g. where memory lies, is part of the noise, and only rounds count as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from octavo.bench.ab.results import OUTPUT_RATE, Comparison, Effect, Regime, TokenMatch, Verdict
from octavo.bench.load.plan import PointRun
from octavo.bench.metrics import METRICS
from octavo.bench.records import RequestRecord
from octavo.bench.statistics import PairedEffect, holm, paired_bootstrap, student_quantile

Tokenize = Callable[[str], Sequence[int]]

_WORTH_SHOWING = math.log(1.05)
_MOST_ROUNDS = 1000
_SIGNIFICANT = 0.05

# The first is the headline. Offline, latencies are places in a queue: when a request has ended is
# all that is told of them.
_METRICS = {
    "offline": (OUTPUT_RATE, "e2e"),
    "closed": (OUTPUT_RATE, "ttft", "tpot", "max_stall", "e2e"),
    "online": ("e2e", "ttft", "tpot", "max_stall"),
}
_CLASS_METRICS = {
    "offline": ("e2e",),
    "closed": ("ttft", "tpot", "e2e"),
    "online": ("ttft", "tpot", "e2e"),
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One arm's play of one round."""

    arm: str
    regime: str
    round: int
    run: PointRun

    @property
    def makespan_s(self) -> float:
        """From when the first request was due to when the last had ended."""
        ends = [r.done_ns for r in self.run.records if r.done_ns is not None]
        start = min((r.scheduled_ns for r in self.run.records), default=self.run.start_ns)
        return (max(ends, default=self.run.end_ns) - start) / 1e9

    @property
    def num_output_tokens(self) -> int:
        """Of requests that succeeded."""
        return sum(record.num_output_tokens for record in self.run.records if record.is_ok)

    @property
    def output_rate(self) -> float:
        """Tokens per second."""
        return self.num_output_tokens / self.makespan_s


def order(arms: Sequence[str], round_number: int) -> list[str]:
    """In which a round plays them."""
    return list(arms if round_number % 2 == 0 else reversed(arms))


def rate_effect(baseline: Sequence[Block], candidate: Sequence[Block]) -> PairedEffect | None:
    """Of output tokens per second, candidate over baseline, round by round; None if one of them
    has none.
    """
    rates = {block.round: block.output_rate for block in baseline}
    both = [(rates[b.round], b.output_rate, b.round) for b in candidate if b.round in rates]
    if not both or not all(base and cand for base, cand, _ in both):
        return None
    logs = [math.log(cand / base) for base, cand, _ in both]
    return paired_bootstrap(logs, [number for _, _, number in both])


@dataclass(frozen=True)
class _Pair:
    """The same request in both arms; both succeeded."""

    round: int
    baseline: RequestRecord
    candidate: RequestRecord

    def log_speedup(self, metric: str) -> float | None:
        """Of a latency. None where one of them has none, or took no time."""
        before = METRICS[metric].values(self.baseline)
        after = METRICS[metric].values(self.candidate)
        if not before or not after or before[0] <= 0 or after[0] <= 0:
            return None
        return math.log(before[0] / after[0])


def compare(
    baseline: str,
    candidate: str,
    regime: Regime,
    blocks: Sequence[Block],
    *,
    tokenize: Tokenize | None = None,
) -> Comparison:
    """What the candidate's blocks show against the baseline's in this regime.

    tokenize: the model's, to compare texts token by token.
    """
    of_baseline = [b for b in blocks if b.arm == baseline and b.regime == regime.name]
    of_candidate = [b for b in blocks if b.arm == candidate and b.regime == regime.name]
    pairs, num_unpaired = _pairs(of_baseline, of_candidate)
    effects = []
    for metric in _METRICS[regime.name]:
        if metric != OUTPUT_RATE:
            found = _latency_effect(metric, None, pairs)
        elif (rates := rate_effect(of_baseline, of_candidate)) is not None:
            found = _effect(metric, None, rates, len(pairs))
        else:
            found = None
        if found is not None:
            effects.append(found)
    by_class: dict[str, list[_Pair]] = {}
    for pair in pairs:
        by_class.setdefault(pair.baseline.class_name, []).append(pair)
    class_effects = [
        found
        for name, its_pairs in sorted(by_class.items())
        for metric in _CLASS_METRICS[regime.name]
        if (found := _latency_effect(metric, name, its_pairs)) is not None
    ]
    return Comparison(
        candidate=candidate,
        baseline=baseline,
        regime=regime.name,
        effects=_judged(effects),
        class_effects=_judged(class_effects),
        num_pairs=len(pairs),
        num_unpaired=num_unpaired,
        match=token_match(pairs_of_texts(pairs), tokenize),
    )


def _pairs(baseline: Sequence[Block], candidate: Sequence[Block]) -> tuple[list[_Pair], int]:
    """Requests that succeeded in both, and how many did not."""
    theirs = {(block.round, r.index): r for block in baseline for r in block.run.records}
    pairs, num_unpaired = [], 0
    for block in candidate:
        for record in block.run.records:
            other = theirs.pop((block.round, record.index), None)
            if other is not None and other.is_ok and record.is_ok:
                pairs.append(_Pair(block.round, other, record))
            else:
                num_unpaired += 1
    return pairs, num_unpaired + len(theirs)


def _latency_effect(metric: str, class_name: str | None, pairs: Sequence[_Pair]) -> Effect | None:
    known = [(v, p.round) for p in pairs if (v := p.log_speedup(metric)) is not None]
    if not known:
        return None
    logs, rounds = zip(*known, strict=True)
    return _effect(metric, class_name, paired_bootstrap(logs, rounds), len(logs))


def _effect(metric: str, class_name: str | None, found: PairedEffect, num_pairs: int) -> Effect:
    """Not judged yet: that takes the others that are asked with it."""
    return Effect(
        metric=metric,
        class_name=class_name,
        speedup=found.ratio,
        num_rounds=found.num_blocks,
        num_pairs=num_pairs,
        p_value=found.p_value,
        verdict=Verdict.UNKNOWN,
        more_rounds=_more_rounds(found),
    )


def _judged(effects: Sequence[Effect]) -> list[Effect]:
    """With Holm's correction over those that can tell something."""
    asked = [effect.p_value for effect in effects if effect.p_value is not None]
    adjusted = iter(holm(asked))
    return [
        effect if effect.p_value is None else _with_verdict(effect, next(adjusted))
        for effect in effects
    ]


def _with_verdict(effect: Effect, p_value: float) -> Effect:
    verdict = verdict_of(effect.speedup.value, p_value)
    return replace(effect, p_value=p_value, verdict=verdict)


def verdict_of(speedup: float, p_value: float | None) -> Verdict:
    if p_value is None:
        return Verdict.UNKNOWN
    if p_value > _SIGNIFICANT:
        return Verdict.NO_DIFFERENCE
    return Verdict.FASTER if speedup > 1 else Verdict.SLOWER


def _more_rounds(found: PairedEffect) -> int | None:
    """About how many more rounds make the interval 5 % wide to each side; None if one round, or no
    number that makes sense, can tell.
    """
    low, high, count = found.log_ratio.low, found.log_ratio.high, found.num_blocks
    if low is None or high is None:
        return None
    half = (high - low) / 2
    deviation = half / student_quantile(0.975, count - 1) * math.sqrt(count)
    for needed in range(count, _MOST_ROUNDS):
        if student_quantile(0.975, needed - 1) * deviation / math.sqrt(needed) <= _WORTH_SHOWING:
            return needed - count
    return None


def pairs_of_texts(pairs: Sequence[_Pair]) -> list[tuple[str, str]]:
    return [
        (pair.baseline.text, pair.candidate.text)
        for pair in pairs
        if pair.baseline.text is not None and pair.candidate.text is not None
    ]


def token_match(texts: Sequence[tuple[str, str]], tokenize: Tokenize | None) -> TokenMatch | None:
    """How far texts agree: in tokens or, without a tokenizer, in characters. None for no texts."""
    divergences: list[int] = []
    num_units = num_matched = 0
    for one, other in texts:
        mine, its = (one, other) if tokenize is None else (tokenize(one), tokenize(other))
        length = max(len(mine), len(its))
        first = next(
            (i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b),
            min(len(mine), len(its)),
        )
        num_units += length
        num_matched += first
        if first < length:
            divergences.append(first)
    if not texts:
        return None
    return TokenMatch(
        unit="characters" if tokenize is None else "tokens",
        num_compared=len(texts),
        num_equal=len(texts) - len(divergences),
        matched_share=num_matched / num_units if num_units else 1.0,
        median_divergence=median(divergences) if divergences else None,
    )
