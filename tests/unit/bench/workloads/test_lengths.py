"""Distributions of lengths: their quantiles, their means, their limits."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from octavo.bench.workloads.lengths import AnyLengths, Lengths, joint
from octavo.bench.workloads.section import said

LENGTHS: TypeAdapter[Lengths] = TypeAdapter(AnyLengths)


def lengths(value: Any) -> Lengths:
    return LENGTHS.validate_python(value)


def test_a_number_is_a_fixed_length() -> None:
    fixed = lengths(512)
    assert {fixed.tokens_at(u) for u in (0.001, 0.5, 0.999)} == {512}
    assert fixed == lengths({"fixed": 512})
    assert fixed.scaled(1 / 16).tokens_at(0.5) == 32


def test_uniform_lengths_have_both_ends_as_often_as_what_lies_between() -> None:
    uniform = lengths({"uniform": [3, 6]})
    drawn = [uniform.tokens_at((i + 0.5) / 4000) for i in range(4000)]
    assert {n: drawn.count(n) for n in set(drawn)} == {3: 1000, 4: 1000, 5: 1000, 6: 1000}
    assert uniform.mean() == pytest.approx(4.5)


def test_a_lognormal_is_cut_without_a_heap_at_its_limits() -> None:
    spread = lengths({"lognormal": {"median": 100, "sigma": 1.0, "low": 50, "high": 400}})
    drawn = [spread.at((i + 0.5) / 10_000) for i in range(10_000)]
    assert min(drawn) >= 50
    assert max(drawn) <= 400
    assert sum(x < 51 for x in drawn) < 300  # the density there, not the mass below
    whole = lengths({"lognormal": {"median": 100, "sigma": 0.5}})
    assert whole.at(0.5) == pytest.approx(100)
    assert whole.mean() == pytest.approx(100 * math.exp(0.5**2 / 2), rel=0.005)


def test_an_exponential_is_cut_to_its_limit_like_answers_by_max_tokens() -> None:
    capped = lengths({"exponential": {"mean": 128, "high": 128}})
    share_at_limit = sum(capped.tokens_at((i + 0.5) / 1000) == 128 for i in range(1000)) / 1000
    assert share_at_limit == pytest.approx(math.exp(-1), abs=0.01)
    assert capped.mean() == pytest.approx(128 * (1 - math.exp(-1)), rel=0.01)


def test_a_table_is_straight_between_its_entries() -> None:
    table = lengths({"quantiles": {0: 10, 50: 20, 90: 100, 100: 500}})
    assert [table.at(u) for u in (0.25, 0.5, 0.7, 0.95)] == [15, 20, 60, 300]
    assert lengths({"quantiles": [10, 20, 40]}).at(0.75) == 30
    assert table.mean() == pytest.approx(0.5 * 15 + 0.4 * 60 + 0.1 * 300, rel=0.005)


def test_no_request_is_shorter_than_a_token() -> None:
    assert lengths({"quantiles": [1, 8]}).scaled(1 / 16).tokens_at(0.01) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("long", "must be a number of tokens, or a mapping with one of fixed, uniform"),
        ({"normal": 5}, "must be a number of tokens, or a mapping with one of"),
        ({"fixed": -1}, "fixed is -1: should be greater than 0"),
        ({"uniform": [9, 3]}, "the first must not be above the second"),
        ({"lognormal": {"median": 9, "sigmo": 1}}, "has no field 'sigmo'; did you mean sigma"),
        ({"lognormal": {"median": 9, "sigma": 1, "low": 9, "high": 2}}, "low must be below high"),
        ({"quantiles": {0: 5, 99: 9}}, "end at 100 percent"),
        ({"quantiles": {0: 5, 50: 4, 100: 9}}, "4 tokens at 50 percent is less than before it"),
        ({"quantiles": {0: "few", 100: 9}}, "must be two numbers"),
        ({"quantiles": {0: 1, 100: 1e12}}, "at most 10000000 tokens"),
    ],
)
def test_what_is_wrong_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        lengths(value)
    assert message in said(raised.value)


def test_the_copula_keeps_both_marginals_and_gives_the_correlation() -> None:
    normal = NormalDist()
    grid = [normal.inv_cdf((i + 0.5) / 60) for i in range(60)]
    pairs = [joint(a, b, -0.6) for a in grid for b in grid]
    scores = [(normal.inv_cdf(u), normal.inv_cdf(v)) for u, v in pairs]
    mean_product = sum(x * y for x, y in scores) / len(scores)
    variance = sum(x * x for x, _ in scores) / len(scores)
    assert mean_product / variance == pytest.approx(-0.6, abs=0.02)
    assert sum(u for _, u in pairs) / len(pairs) == pytest.approx(0.5, abs=0.01)
