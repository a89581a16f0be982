"""Whether a deployment keeps its SLO, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from octavo.advisor.bounds import Bound, forbidden
from octavo.advisor.choosing import Candidate
from octavo.advisor.estimate import Deployed, Prediction
from octavo.advisor.promise import Promise
from octavo.advisor.rules import REJECT
from octavo.simulator.cost_model import Provenance

_GROWS = "more comes than can be done, the queue grows"
_CERTAIN = 0.9
"""Share of draws from which on an answer is given without a maybe."""


class Verdict(StrEnum):
    MEETS = "meets the SLO"
    PROBABLY = "probably meets the SLO"
    PROBABLY_NOT = "probably misses the SLO"
    MISSES = "misses the SLO"
    IMPOSSIBLE = "can't meet the SLO on this hardware"
    DOES_NOT_FIT = "does not fit"
    FITS = "fits"

    @property
    def is_good(self) -> bool:
        return self in (Verdict.MEETS, Verdict.PROBABLY, Verdict.FITS)


@dataclass(frozen=True, slots=True)
class Judgement:
    """binding: what limits it, in words; provenance: of the numbers in them."""

    verdict: Verdict
    binding: str
    provenance: Provenance


def judge(
    deployed: Deployed,
    promise: Promise | None,
    prediction: Prediction | None,
    floors: tuple[Bound, ...],
    fits: bool,
    ranked: list[Candidate],
) -> Judgement:
    """ranked: layouts, best first."""
    if not fits or prediction is None:
        closest = ranked[0]
        reasons = [finding.reason for finding in closest.findings if finding.rule.effect == REJECT]
        words = f"{closest.layout}: {'; '.join(reasons)}"
        return Judgement(Verdict.DOES_NOT_FIT, words, deployed.memory.provenance)
    if impossible := forbidden(promise, floors):
        limit, bound = impossible[0]
        words = f"{limit}: {bound.says} allows {bound.floor_ms:,.1f} ms at best, since {bound.how}"
        return Judgement(Verdict.IMPOSSIBLE, words, bound.provenance)
    provenance = prediction.provenance
    if promise is None:
        words = _bottleneck(deployed, prediction)
        if not prediction.is_stable:
            words = f"{_GROWS}; {words}"
        return Judgement(Verdict.FITS, words, provenance)
    limit, found = max(
        prediction.limits_ms.items(), key=lambda item: item[1].value / item[0].limit_ms
    )
    nearest = (
        f"{limit.metric.upper()} p{100 * limit.q:g} {found.value:,.0f} of {limit.limit_ms:g} ms; "
        f"{_bottleneck(deployed, prediction, limit.metric)}"
    )
    if not prediction.is_stable:
        words = f"{_GROWS}; {nearest}"
        return Judgement(Verdict.MISSES, words, provenance)
    chance = prediction.chance or 0.0
    if prediction.meets:
        verdict = Verdict.MEETS if chance >= _CERTAIN else Verdict.PROBABLY
    else:
        verdict = Verdict.MISSES if chance <= 1 - _CERTAIN else Verdict.PROBABLY_NOT
    return Judgement(verdict, nearest, provenance)


def _bottleneck(deployed: Deployed, prediction: Prediction, metric: str = "tpot") -> str:
    """metric: of the limit that is nearest."""
    lane_batch = prediction.batch / deployed.layout.pp
    if lane_batch >= 0.98 * deployed.most_running:
        if deployed.memory.users_mean <= deployed.settings.num_seqs:
            return f"KV memory bounds the batch at {deployed.memory.users_mean:,.0f} users"
        return f"max-num-seqs bounds the batch at {deployed.settings.num_seqs}"
    if prediction.prefill_share > 0.5:
        return f"prompts take {prediction.prefill_share:.0%} of the time"
    if metric == "ttft":
        prompt = max(1.0, deployed.traffic.lengths.input_p99 * (1 - deployed.traffic.hit_rate))
        chunk = min(prompt, deployed.settings.token_budget)
        alone_ms = 1e3 * deployed.steps.mixed(0, chunk) * prompt / chunk
        return f"a prompt of {prompt:,.0f} tokens alone takes {alone_ms:,.0f} ms"
    count = max(1, round(prediction.batch))
    return f"decoding {count:,} sequence{'s' * (count > 1)} a step bounds it"
