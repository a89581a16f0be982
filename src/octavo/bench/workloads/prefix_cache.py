"""Whether a prefix cache found what it was meant to find, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.records import RequestRecord
from octavo.bench.workloads.request import PlannedRequest

_CHANCE_TOKENS = 4
"""Of two prompts that share nothing, the first few can agree: a chat's first word, a digit or two
of their numbers.
"""


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Shares of the prompt tokens of one load point. intended: that earlier requests of it have,
    too; a cache without limit finds them unless they come at the same time. achieved: that the
    server had cached. unintended: that it had beyond what was meant to be shared and what a chat
    template puts before each prompt: the cache knows these prompts from elsewhere.
    """

    intended: float
    achieved: float
    unintended: float


def cache_hits(
    requests: Sequence[PlannedRequest],
    records: Sequence[RequestRecord],
    hit_rate: float | None = None,
) -> CacheHits | None:
    """hit_rate: by the server's counters over all requests; taken where it doesn't say what it had
    of each. None if it says neither.
    """
    by_index = {request.index: request for request in requests}
    pairs = [(by_index[r.index], r) for r in records if r.is_ok and r.index in by_index]
    told = [(p, r, r.num_cached_tokens) for p, r in pairs if r.num_cached_tokens is not None]
    if told:
        total = sum(_prompt_tokens(record) for _, record, _ in told)
        beyond = [
            max(0, cached - request.shared_len - _template_tokens(record) - _CHANCE_TOKENS)
            for request, record, cached in told
        ]
        return CacheHits(
            intended=sum(request.shared_len for request, _, _ in told) / total,
            achieved=sum(cached for _, _, cached in told) / total,
            unintended=sum(beyond) / total,
        )
    if not pairs or hit_rate is None:
        return None
    total = sum(_prompt_tokens(record) for _, record in pairs)
    intended = sum(request.shared_len for request, _ in pairs) / total
    template = sum(_template_tokens(record) for _, record in pairs) / total
    return CacheHits(
        intended=intended,
        achieved=hit_rate,
        unintended=max(0.0, hit_rate - intended - template),
    )


def _prompt_tokens(record: RequestRecord) -> int:
    return record.num_prompt_tokens or record.prompt_len


def _template_tokens(record: RequestRecord) -> int:
    """What the server counted beyond the plan."""
    return max(0, _prompt_tokens(record) - record.prompt_len)


@dataclass(frozen=True, kw_only=True)
class CacheProbe:
    """What sending one prompt twice shows. cached_share: of the second one's prompt tokens, None if
    the server does not say. ttft_ratio: of the second to the first.
    """

    cached_share: float | None
    ttft_ratio: float | None

    @property
    def has_prefix_cache(self) -> bool:
        """By what the server says; where it says nothing, by a time to first token that halved."""
        if self.cached_share is not None:
            return self.cached_share > 0
        return self.ttft_ratio is not None and self.ttft_ratio < 0.5


def cache_probe(first: RequestRecord, second: RequestRecord) -> CacheProbe:
    """Of one prompt, long against a block of the cache and new to the server, that was sent twice,
    one after the other.
    """
    share = None
    if second.num_cached_tokens is not None:
        share = second.num_cached_tokens / (second.num_prompt_tokens or second.prompt_len)
    times = [_ttft_ns(record) for record in (first, second)]
    ratio = times[1] / times[0] if times[0] and times[1] else None
    return CacheProbe(cached_share=share, ttft_ratio=ratio)


def _ttft_ns(record: RequestRecord) -> int | None:
    if record.sent_ns is None or not record.chunk_ns:
        return None
    return record.chunk_ns[0] - record.sent_ns
