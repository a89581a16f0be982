from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.advisor.tuning.feasibility import Facts, pruned
from octavo.advisor.tuning.knobs import knob_space
from octavo.advisor.tuning.space import Space
from octavo.bench.workloads.presets import workload_named

SPACE = knob_space((), fixed={}, num_cpus=4)
FACTS = Facts.of(
    workload_named("chat"),
    longest_request_tokens=1500,
    kv_tokens=4000,
    max_model_len=2048,
    max_num_seqs=128,
    step_budget=512,
)


def values(space: Space, name: str) -> tuple[Any, ...]:
    return next((d.values for d in space.dimensions if d.name == name), ())


def test_more_sequences_than_the_cache_can_hold_are_not_tried() -> None:
    space, cuts = pruned(SPACE, FACTS)
    # Twice 4000 tokens are about 26 requests of 300: one value beyond stays.
    assert FACTS.mean_request_tokens == pytest.approx(290, rel=0.15)
    assert values(space, "max_num_seqs") == (None, 4, 8, 16, 32)
    (cut,) = [cut for cut in cuts if cut.knob == "max_num_seqs"]
    assert cut.values == (64, 256, 512)
    assert "4,000 tokens" in cut.why


def test_a_prefix_cache_needs_something_to_share() -> None:
    assert values(pruned(SPACE, FACTS)[0], "enable_prefix_caching") == ()
    shared = Facts.of(workload_named("shared-prefix"), longest_request_tokens=700)
    assert values(pruned(SPACE, shared)[0], "enable_prefix_caching") == (None, False)


def test_more_memory_does_nothing_where_there_is_enough() -> None:
    assert values(pruned(SPACE, FACTS)[0], "gpu_memory_utilization") != ()
    roomy = replace(FACTS, kv_tokens=128 * 1500)
    space, cuts = pruned(SPACE, roomy)
    assert values(space, "gpu_memory_utilization") == ()
    assert any("already holds all" in cut.why for cut in cuts)


def test_the_default_is_not_tried_under_another_name() -> None:
    assert 512 not in values(pruned(SPACE, FACTS)[0], "max_num_batched_tokens")


def test_settings_that_can_not_be_are_not_allowed() -> None:
    space, _ = pruned(SPACE, FACTS)
    whole = {"enable_chunked_prefill": False}
    assert space.allows(space.setting(whole))
    assert not space.allows(space.setting({**whole, "max_num_batched_tokens": 1024}))
    assert space.allows(space.setting({**whole, "max_num_batched_tokens": 2048}))
    roomy, _ = pruned(SPACE, replace(FACTS, kv_tokens=10**6))
    crowd = {"max_num_seqs": 256, "max_num_batched_tokens": 64}
    assert not roomy.allows(roomy.setting(crowd))
    assert roomy.allows(roomy.setting({**crowd, "max_num_batched_tokens": 256}))
    assert space.allows(space.default)


def test_of_an_unknown_engine_nothing_is_cut() -> None:
    unknown = Facts.of(workload_named("shared-prefix"), longest_request_tokens=700)
    space, cuts = pruned(SPACE, unknown)
    assert cuts == []
    assert space.size == SPACE.size
