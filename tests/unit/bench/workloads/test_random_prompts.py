from __future__ import annotations

import pytest

from octavo.bench.workloads.random_prompts import RandomPrompts, check_fits
from octavo.core.errors import ConfigError


def test_prompts_are_new_and_repeatable() -> None:
    prompts = RandomPrompts(300, seed=1)
    taken = [prompts.take(16) for _ in range(200)]
    assert len({tuple(prompt) for prompt in taken}) == 200
    assert {token for prompt in taken for token in prompt} == set(range(300))
    again = RandomPrompts(300, seed=1)
    assert [again.take(16) for _ in range(200)] == taken
    assert RandomPrompts(300, seed=2).take(16) != taken[0]


def test_lengths_lie_within_the_ratio() -> None:
    prompts = RandomPrompts(300, seed=1)
    assert {prompts.length_near(10, 0.0) for _ in range(50)} == {10}
    assert {prompts.length_near(10, 0.25) for _ in range(500)} == {8, 9, 10, 11, 12}
    assert {prompts.length_near(1, 1.0) for _ in range(50)} == {1, 2}


def test_what_does_not_fit_is_told_with_its_numbers() -> None:
    check_fits(10, 6, 16)
    with pytest.raises(ConfigError, match=r"11 input tokens and 6 output tokens .* 16 tokens"):
        check_fits(11, 6, 16)
