"""Whether a prefix cache found what it was meant to find, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.records import RequestRecord
from octavo.bench.workloads.request import PlannedRequest


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Prompt tokens of the requests for which the server says what it had cached, as shares of
    theirs. intended: that earlier requests of the same load point had, which a cache without limit
    finds unless they come at the same time. achieved: that the server had. unintended: that it had
    beyond what was meant to be shared, request by request: the cache knows these prompts from
    elsewhere.
    """

    num_requests: int
    intended: float
    achieved: float
    unintended: float


def cache_hits(
    requests: Sequence[PlannedRequest], records: Sequence[RequestRecord], slack_tokens: int = 32
) -> CacheHits | None:
    """Of the requests of one load point; None if the server never says what it had cached.

    slack_tokens: of each prompt, what any two have in common: BOS, the beginning of a chat
    template, and the first words of a prompt's number where they agree by chance.
    """
    by_index = {request.index: request for request in requests}
    told = [
        (by_index[record.index], record.num_cached_tokens, record.num_prompt_tokens)
        for record in records
        if record.num_cached_tokens is not None and record.index in by_index
    ]
    total = sum(num_prompt or request.prompt_len for request, _, num_prompt in told)
    if not total:
        return None
    beyond = [max(0, cached - request.shared_len - slack_tokens) for request, cached, _ in told]
    return CacheHits(
        num_requests=len(told),
        intended=sum(request.shared_len for request, _, _ in told) / total,
        achieved=sum(cached for _, cached, _ in told) / total,
        unintended=sum(beyond) / total,
    )


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
