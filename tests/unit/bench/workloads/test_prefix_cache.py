"""What a prefix cache found, against what it was meant to find."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.records import Failure, RequestRecord
from octavo.bench.workloads.prefix_cache import cache_hits, cache_probe
from octavo.bench.workloads.request import PlannedRequest


def planned(index: int, shared_len: int) -> PlannedRequest:
    return PlannedRequest(
        index=index, class_name="c", prompt="", prompt_len=100, max_tokens=1, shared_len=shared_len
    )


def record(index: int, **fields: Any) -> RequestRecord:
    values = {"num_prompt_tokens": 100, **fields}
    return RequestRecord(
        index=index, class_name="c", scheduled_ns=0, prompt_len=100, max_tokens=1, **values
    )


def test_intended_hits_are_not_pollution() -> None:
    requests = [planned(0, 0), planned(1, 64), planned(2, 64)]
    records = [record(i, num_cached_tokens=n) for i, n in enumerate((0, 64, 48))]
    hits = cache_hits(requests, records)
    assert hits is not None
    assert (hits.intended, hits.achieved, hits.unintended) == (128 / 300, 112 / 300, 0)


def test_prompts_that_the_server_knew_are_pollution() -> None:
    """Though others missed what they were meant to find: it is no average."""
    requests = [planned(0, 0), planned(1, 96)]
    records = [record(0, num_cached_tokens=96), record(1, num_cached_tokens=0)]
    hits = cache_hits(requests, records)
    assert hits is not None
    assert hits.achieved == hits.intended == 96 / 200
    assert hits.unintended == (96 - 4) / 200


def test_what_a_chat_template_adds_is_common_to_all() -> None:
    templated = record(0, num_prompt_tokens=130, num_cached_tokens=32)
    hits = cache_hits([planned(0, 0)], [templated])
    assert hits is not None
    assert hits.unintended == 0


def test_the_servers_counters_do_where_it_does_not_say_for_each() -> None:
    assert cache_hits([planned(0, 0)], [record(0)]) is None
    hits = cache_hits([planned(0, 0), planned(1, 50)], [record(0), record(1)], hit_rate=0.75)
    assert hits is not None
    assert (hits.intended, hits.achieved, hits.unintended) == (0.25, 0.75, 0.5)
    templated = [record(0, num_prompt_tokens=200)]
    hits = cache_hits([planned(0, 0)], templated, hit_rate=0.5)
    assert hits is not None
    assert hits.unintended == 0


def test_failed_requests_are_left_out() -> None:
    failed = record(1, num_cached_tokens=100, failure=Failure.TIMEOUT)
    hits = cache_hits([planned(0, 0), planned(1, 0)], [record(0, num_cached_tokens=0), failed])
    assert hits is not None
    assert hits.achieved == 0


def test_a_probe_believes_the_server_before_the_clock() -> None:
    slow = record(0, sent_ns=0, chunk_ns=[1000], num_cached_tokens=0)
    fast = record(1, sent_ns=5000, chunk_ns=[5100], num_cached_tokens=0)
    probe = cache_probe(slow, fast)
    assert probe.ttft_ratio == pytest.approx(0.1)
    assert not probe.has_prefix_cache
    known = cache_probe(slow, record(1, sent_ns=0, chunk_ns=[900], num_cached_tokens=96))
    assert (known.cached_share, known.has_prefix_cache) == (0.96, True)


def test_a_probe_without_cached_tokens_goes_by_the_time() -> None:
    first = record(0, sent_ns=0, chunk_ns=[1000])
    assert cache_probe(first, record(1, sent_ns=0, chunk_ns=[300])).has_prefix_cache
    assert not cache_probe(first, record(1, sent_ns=0, chunk_ns=[800])).has_prefix_cache
    failed = cache_probe(first, record(1, sent_ns=0))
    assert (failed.ttft_ratio, failed.has_prefix_cache) == (None, False)
