"""Costs from the speed of a machine's kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.model_spec import KVFormat, ModelSpec
from octavo.core.weight_format import weight_format
from octavo.simulator.hardware import Efficiency
from octavo.simulator.measured import MachineSpeeds, MeasuredCost, kernel_format, with_more
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.roofline import Deployment, Drafter
from octavo.simulator.work import AttentionWork, StepWork
from support.public_configs import (
    DEEPSEEK_V3,
    QWEN2_5_500M,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
)

SPEC = spec_from_config(QWEN2_5_500M)
SPEEDS = MachineSpeeds(
    threads=2,
    linear={
        "int4": ((1, 2e-11), (8, 3e-11), (64, 24e-11)),
        "int8": ((1, 4e-11), (8, 5e-11), (64, 40e-11)),
    },
    decoding={"bfloat16": 5e-11},
    chunks={"bfloat16": 1e-11},
    value_seconds=0.0,
    op_seconds=0.0,
)
NO_HOST = Efficiency(1, 1, 1, 1, 0.0, 0.0, 0.0, {})
DEPLOYMENT = Deployment(matrices=weight_format("q4_0"), rest=weight_format("q8_0"))


def step(rows: int, logit_rows: int, *, context: int = 0, pairs: int = 0) -> StepWork:
    attention = AttentionWork(None, context, 0, pairs, 0)
    return StepWork(rows, logit_rows, 1, 0, 0, 0, 0, (attention,))


@pytest.mark.parametrize(
    ("rows", "weight_seconds"),
    [(1, 2e-11), (8, 3e-11), (36, 13.5e-11), (120, 45e-11)],  # between knots and beyond them
)
def test_products_go_by_what_was_measured(rows: int, weight_seconds: float) -> None:
    cost = MeasuredCost(SPEC, SPEEDS, DEPLOYMENT, NO_HOST)
    expected = SPEC.num_matrix_parameters * weight_seconds
    assert cost.seconds(step(rows, 0)) == pytest.approx(expected)


def test_the_head_is_for_rows_whose_logits_are_needed() -> None:
    cost = MeasuredCost(SPEC, SPEEDS, DEPLOYMENT, NO_HOST)
    head = cost.seconds(step(64, 1)) - cost.seconds(step(64, 0))
    assert head == pytest.approx(SPEC.num_embedding_parameters * 4e-11)


def test_attention_reads_the_cache_or_multiplies() -> None:
    cost = MeasuredCost(SPEC, SPEEDS, DEPLOYMENT, NO_HOST)
    base = cost.seconds(step(1, 0))
    token_bytes = SPEC.kv_bytes_per_token(KVFormat("bfloat16"))
    assert cost.seconds(step(1, 0, context=1000)) - base == pytest.approx(5e-8 * token_bytes)
    flops = 24 * 4 * 14 * 64
    assert cost.seconds(step(1, 0, pairs=10**6)) - base == pytest.approx(1e-5 * flops)


def test_recurrent_layers_read_and_write_a_state_and_compute() -> None:
    spec = spec_from_config(QWEN3_NEXT_80B_A3B)
    attention_alone = replace(
        spec, layers=tuple(replace(layer, mixer=layer.attention) for layer in spec.layers)
    )
    one = step(40, 0)._replace(num_sequences=8)

    def in_attention(spec: ModelSpec) -> float:
        slow, fast = (
            MeasuredCost(spec, SPEEDS, DEPLOYMENT, NO_HOST, attention_slowness=slowness)
            for slowness in (1.0, 0.0)
        )
        return slow.seconds(one) - fast.seconds(one)

    flops = 36 * (7 * 32 * 128 * 128 + 2 * 8192 * 4)
    expected = 8 * 2 * spec.state_bytes * 5e-11 + 40 * flops * 1e-11
    assert in_attention(spec) == pytest.approx(expected)
    assert in_attention(attention_alone) == 0


def test_later_chunks_make_latent_keys_again() -> None:
    spec = spec_from_config(DEEPSEEK_V3)
    cost = MeasuredCost(spec, SPEEDS, DEPLOYMENT, NO_HOST)
    first = StepWork(512, 0, 1, 0, 0, 0, 0, (AttentionWork(None, 0, 9000, 512 * 8000, 0),))
    later = first._replace(attention=(first.attention[0]._replace(known_context=8488),))
    again = 61 * 8488 * 2 * 512 * 128 * (128 + 128)
    assert cost.seconds(later) - cost.seconds(first) == pytest.approx(again * 1e-11)


def test_each_expert_has_its_share_of_the_rows() -> None:
    """32 rows that use 8 of 128 experts each: 112 are touched, by about two rows."""
    spec = spec_from_config(QWEN3_30B_A3B)
    cost = MeasuredCost(spec, SPEEDS, DEPLOYMENT, NO_HOST)
    touched = 128 * (1 - (1 - 8 / 128) ** 32)
    in_experts = 48 * touched * 3 * 2048 * 768
    others = spec.num_touched_parameters(32) - in_experts
    few, many = 2e-11 + (32 * 8 / touched - 1) / 7 * 1e-11, 12e-11
    assert cost.seconds(step(32, 0)) == pytest.approx(in_experts * few + others * many)
    assert cost.seconds(step(1, 0)) == pytest.approx(spec.num_active_matrix_parameters * 2e-11)


def test_a_drafter_takes_its_steps_one_after_another() -> None:
    small = replace(SPEC, layers=SPEC.layers[:2])
    deployment = replace(DEPLOYMENT, drafter=Drafter(small, 0, has_own_cache=True))
    guessing = step(20, 20)._replace(num_drafting=4, num_draft_tokens=16, longest_draft=4)
    alone = MeasuredCost(small, SPEEDS, DEPLOYMENT, NO_HOST).seconds(step(4, 4))
    cost = MeasuredCost(SPEC, SPEEDS, deployment, NO_HOST)
    assert cost.draft_seconds(guessing) == pytest.approx(4 * alone)
    assert cost.draft_seconds(step(4, 4)) == 0
    drawn = MeasuredCost(SPEC, SPEEDS, deployment).draw(random.Random(0))
    assert drawn.draft_seconds(guessing) > 0
    assert MeasuredCost(SPEC, SPEEDS, DEPLOYMENT, NO_HOST).draft_seconds(guessing) == 0


def test_draws_differ_by_some_percent() -> None:
    cost = MeasuredCost(SPEC, SPEEDS, DEPLOYMENT)
    one = step(4, 4, context=800)
    drawn = sorted(cost.draw(random.Random(seed)).seconds(one) for seed in range(101))
    assert drawn[50] == pytest.approx(cost.seconds(one), rel=0.05)
    assert 1.15 < drawn[95] / drawn[5] < 1.6


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        ("float32", "float32"),
        ("bf16", "bfloat16"),
        ("q8_0", "int8"),
        ("Q4_1", "int4 with minimum"),
        ("Q4_0", "int4"),
    ],
)
def test_formats_that_kernels_hold(stored: str, held: str) -> None:
    assert kernel_format(weight_format(stored)) == held


def test_speeds_are_kept_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "speeds" / "one.json"
    assert MachineSpeeds.load(path) is None
    SPEEDS.save(path)
    assert MachineSpeeds.load(path) == SPEEDS
    more = replace(SPEEDS, linear={"float32": ((1, 1e-10), (8, 2e-10))}, decoding={})
    assert set(with_more(SPEEDS, more).linear) == {"int4", "int8", "float32"}
    assert with_more(SPEEDS, more).decoding == SPEEDS.decoding
    path.write_text('{"threads": 2}')
    assert MachineSpeeds.load(path) is None
