"""Requests of a workload: their classes, lengths, words, prefixes and arrivals."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from octavo.bench.workloads.presets import workload_named
from octavo.bench.workloads.request import PlannedRequest, clipping
from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.bench.workloads.workload import Workload

BLOCK = 16


def workload(**only: Any) -> Workload:
    each = {"name": "only", "in": 100, "out": 10, **only}
    return Workload.model_validate({"name": "w", "classes": [each]})


def ids(request: PlannedRequest) -> tuple[Any, ...]:
    assert isinstance(request.prompt, tuple)
    return request.prompt


def common(a: tuple[Any, ...], b: tuple[Any, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_a_seed_gives_the_same_requests_and_another_gives_others(vocabulary: Vocabulary) -> None:
    mixed = workload_named("mixed")
    first = mixed.requests(seed=3, count=60, vocabulary=vocabulary, rate=2.0, nonce="p")
    assert mixed.requests(seed=3, count=60, vocabulary=vocabulary, rate=2.0, nonce="p") == first
    other = mixed.requests(seed=4, count=60, vocabulary=vocabulary, rate=2.0, nonce="p")
    assert [r.prompt_len for r in other] != [r.prompt_len for r in first]


def test_rates_nonces_and_counts_change_nothing_else(vocabulary: Vocabulary) -> None:
    """Common random numbers: what is compared differs in what is varied alone."""

    def plan(**changes: Any) -> list[tuple[Any, ...]]:
        options = {"seed": 3, "count": 60, "rate": 2.0, "nonce": "p", **changes}
        requests = workload_named("mixed").requests(vocabulary=vocabulary, **options)
        return [(r.class_name, r.prompt_len, r.max_tokens, ids(r)[40:]) for r in requests]

    assert plan(rate=9.0) == plan()
    assert plan(rate=None) == plan()
    assert plan(count=100)[:60] == plan()
    assert plan(nonce="q") == plan()


def test_classes_come_in_their_shares_in_every_stretch(vocabulary: Vocabulary) -> None:
    requests = workload_named("mixed").requests(seed=0, count=400, vocabulary=vocabulary)
    for stretch in (requests[:80], requests[80:160], requests):
        shares = Counter(r.class_name for r in stretch)
        for name, share in {"chat": 0.5, "rag": 0.2, "code": 0.15, "burst": 0.05}.items():
            assert shares[name] / len(stretch) == pytest.approx(share, abs=0.05)


def test_a_burst_comes_at_once_and_the_rate_is_kept(vocabulary: Vocabulary) -> None:
    bursts = workload(burst=4, **{"in": 8})
    requests = bursts.requests(seed=1, count=4000, vocabulary=vocabulary, rate=10.0)
    times = [r.arrival_s for r in requests]
    assert all(len(set(times[i : i + 4])) == 1 for i in range(0, 4000, 4))
    assert len(set(times)) == 1000
    assert 4000 / (times[-1] or 0) == pytest.approx(10, rel=0.1)


def test_no_two_prompts_share_a_block_in_any_seed_or_load_point(vocabulary: Vocabulary) -> None:
    plain = workload(**{"in": {"uniform": [40, 60]}})
    blocks = Counter(
        ids(request)[:BLOCK]
        for seed in (1, 2)
        for nonce in ("a", "b")
        for request in plain.requests(seed=seed, count=200, vocabulary=vocabulary, nonce=nonce)
    )
    assert set(blocks.values()) == {1}
    assert len(blocks) == 800


def test_a_prefix_is_shared_exactly_and_by_its_own_group_only(vocabulary: Vocabulary) -> None:
    shared = workload(prefix={"count": 3, "tokens": 48}, **{"in": 20})
    requests = shared.requests(seed=1, count=60, vocabulary=vocabulary)
    assert {r.prompt_len for r in requests} == {68}
    groups = defaultdict(list)
    for request in requests:
        groups[ids(request)[:48]].append(request)
    assert len(groups) == 3
    for group in groups.values():
        assert [r.shared_len for r in group] == [0] + [48] * (len(group) - 1)
        assert common(ids(group[0]), ids(group[1])) < 48 + BLOCK
    first = [group[0] for group in groups.values()]
    assert common(ids(first[0]), ids(first[1])) < BLOCK


def test_another_load_point_has_other_prefixes(vocabulary: Vocabulary) -> None:
    shared = workload(prefix={"tokens": 48})
    [a] = shared.requests(seed=1, count=1, vocabulary=vocabulary, nonce="a")
    [b] = shared.requests(seed=1, count=1, vocabulary=vocabulary, nonce="b")
    assert common(ids(a), ids(b)) < BLOCK


def test_a_prefix_can_be_a_share_of_each_prompt(vocabulary: Vocabulary) -> None:
    shared = workload(prefix={"share": 0.4}, **{"in": {"uniform": [100, 200]}})
    requests = shared.requests(seed=1, count=100, vocabulary=vocabulary)
    hits = sum(r.shared_len for r in requests) / sum(r.prompt_len for r in requests)
    assert hits == pytest.approx(0.4, abs=0.02)
    assert common(ids(requests[0]), ids(requests[1])) >= min(
        int(0.4 * r.prompt_len) for r in requests[:2]
    )


def test_in_a_chat_the_shared_part_is_the_systems(vocabulary: Vocabulary) -> None:
    shared = workload(prefix={"tokens": 48}, **{"in": 20})
    [request] = shared.requests(seed=1, count=1, vocabulary=vocabulary, api="chat")
    roles = {m["role"]: len(m["content"].split()) for m in ids(request)}
    assert roles == {"system": 48, "user": 20}


def test_repetition_copies_stretches_of_the_same_prompt(vocabulary: Vocabulary) -> None:
    def share_of_known(repetition: float) -> float:
        plain = workload(repetition=repetition, **{"in": 2000})
        [request] = plain.requests(seed=1, count=1, vocabulary=wide(), takes_token_ids=False)
        words = str(request.prompt).split()
        grams = [tuple(words[i : i + 8]) for i in range(0, len(words) - 8)]
        return 1 - len(set(grams)) / len(grams)

    assert share_of_known(0.7) > share_of_known(0.0) + 0.1


def wide() -> Vocabulary:
    """Every word is one token."""
    return Vocabulary.learn(lambda text: [hash(word) for word in text.split(" ")])


def test_what_does_not_fit_is_shortened_in_proportion_and_told(vocabulary: Vocabulary) -> None:
    long = workload(**{"in": 300, "out": 100, "prefix": {"tokens": 100}})
    requests = long.requests(seed=1, count=4, vocabulary=vocabulary, max_model_len=250)
    for request in requests:
        assert request.prompt_len + request.max_tokens == 250
        assert request.prompt_len == len(ids(request)) == 200
        assert request.clipped_len == 250
    assert requests[1].shared_len == 50
    said = clipping(requests)
    assert said is not None
    assert "4 of 4 requests" in said
    assert "50.0 %" in said
    assert clipping(long.requests(seed=1, count=4, vocabulary=vocabulary)) is None


def test_a_chat_leaves_room_for_its_template(vocabulary: Vocabulary) -> None:
    from dataclasses import replace

    long = workload(**{"in": 300, "out": 100})
    with_template = replace(vocabulary, chat_overhead=50)
    [request] = long.requests(
        seed=1, count=1, vocabulary=with_template, api="chat", max_model_len=250
    )
    assert request.prompt_len + request.max_tokens == 200


def test_scaling_keeps_the_shape_and_says_so() -> None:
    whole = workload_named("azure_conv")
    part = whole.scaled(1 / 16)
    assert part.name == "azure_conv ÷16"
    (in_whole, out_whole), (in_part, out_part) = whole.mean_lengths(), part.mean_lengths()
    assert in_part == pytest.approx(in_whole / 16, rel=0.01)
    assert out_part == pytest.approx(out_whole / 16, rel=0.02)
    assert part.scaled(1) is part


def test_scaling_keeps_what_is_shared(vocabulary: Vocabulary) -> None:
    def hits(each: Workload) -> float:
        requests = each.requests(seed=1, count=200, vocabulary=vocabulary)
        return sum(r.shared_len for r in requests) / sum(r.prompt_len for r in requests)

    whole = workload_named("shared-prefix")
    assert hits(whole.scaled(1 / 4)) == pytest.approx(hits(whole), abs=0.01)


def test_fixed_lengths_are_those_of_vllms_random_dataset(vocabulary: Vocabulary) -> None:
    near = Workload.of_lengths(100, 20, range_ratio=0.1, prefix_len=32)
    requests = near.requests(seed=1, count=500, vocabulary=vocabulary)
    assert {r.prompt_len - 32 for r in requests} == set(range(90, 111))
    assert {r.max_tokens for r in requests} == set(range(18, 23))
    assert near.name == "32 shared + 100/20 ±10 %"
    exact = Workload.of_lengths(64, 8).requests(seed=1, count=9, vocabulary=vocabulary)
    assert {(r.prompt_len, r.max_tokens) for r in exact} == {(64, 8)}


def test_a_prompt_shorter_than_its_number_is_cut(vocabulary: Vocabulary) -> None:
    tiny = Workload.of_lengths(3, 1).requests(seed=1, count=5, vocabulary=vocabulary)
    assert [len(ids(r)) for r in tiny] == [3] * 5
