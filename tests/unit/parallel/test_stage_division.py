"""Layers in stages: the cut is the best there is, by brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec
from octavo.parallel.stage_division import cheapest_cut, divide_layers


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(problems())
def test_no_cut_has_a_cheaper_costliest_part(problem: tuple[list[int], int]) -> None:
    costs, num_parts = problem
    ranges = cheapest_cut(costs, num_parts)
    assert [i for part in ranges for i in part] == list(range(len(costs)))
    assert len(ranges) == num_parts
    assert all(ranges)
    best = min(
        max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), num_parts - 1)
    )
    assert max(sum(costs[i] for i in part) for part in ranges) == best


def spec(num_layers: int, *, vocab_size: int = 100, mixtures: int = 0) -> ModelSpec:
    attention = AttentionSpec(4, 4, 16)
    experts = MoESpec(MLPSpec(64), num_experts=8, num_active=2)
    return ModelSpec(
        family="made up",
        vocab_size=vocab_size,
        hidden_size=64,
        max_position=100,
        layers=tuple(
            LayerSpec(attention, MLPSpec(128) if i < num_layers - mixtures else experts)
            for i in range(num_layers)
        ),
        ties_embeddings=False,
        num_vector_parameters=64,
    )


def sizes(spec: ModelSpec, num_stages: int) -> list[int]:
    return [len(part) for part in divide_layers(spec, num_stages)]


def test_layers_that_are_alike_are_divided_evenly() -> None:
    assert sizes(spec(12), 4) == [3, 3, 3, 3]
    assert sizes(spec(12), 1) == [12]


def test_the_head_costs_as_many_layers_as_it_is_large() -> None:
    layer = 4 * 64 * 64 + 3 * 64 * 128
    assert sizes(spec(12, vocab_size=2 * layer // 64), 2) == [7, 5]


def test_layers_with_more_weights_to_read_count_more() -> None:
    assert sizes(spec(9, mixtures=3), 2) == [6, 3]


def test_more_stages_than_layers_are_refused() -> None:
    """MDL-07."""
    with pytest.raises(ConfigError, match=r"size 5: the model has 4 layers.* use at most 4"):
        divide_layers(spec(4), 5)
