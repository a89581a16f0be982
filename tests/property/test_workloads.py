"""Whatever the distributions: lengths within bounds, prompts as long as they say, nothing shared
but what is meant to be, and the same again for the same seed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from octavo.bench.workloads.arrivals import Gamma, arrival_times, burstiness_of
from octavo.bench.workloads.lengths import AnyLengths, Lengths
from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.bench.workloads.workload import Workload
from support.served_models import TOKENIZERS, model_named

LENGTHS: TypeAdapter[Lengths] = TypeAdapter(AnyLengths)
VOCABULARIES = {name: Vocabulary.learn(model_named(name).tokenizer.encode) for name in TOKENIZERS}


@st.composite
def bounded_lengths(draw: st.DrawFn, most: int = 120) -> tuple[Any, int, int]:
    """A distribution, and what its lengths lie between."""
    low, high = sorted((draw(st.integers(1, most)), draw(st.integers(1, most))))
    kind = draw(st.sampled_from(["fixed", "uniform", "lognormal", "exponential", "quantiles"]))
    if kind == "fixed":
        return low, low, low
    if kind == "uniform":
        return {"uniform": [low, high]}, low, high
    if kind == "exponential":
        return {"exponential": {"mean": draw(st.integers(1, 2 * most)), "high": high}}, 1, high
    if kind == "lognormal":
        shape = {"median": draw(st.integers(1, most)), "sigma": draw(st.floats(0.1, 2))}
        return {"lognormal": {**shape, "low": low, "high": high + 1}}, low, high + 1
    middle = draw(st.lists(st.integers(low, high), max_size=6))
    knots = [low, *sorted(middle), high]
    return {"quantiles": knots}, low, high


@given(bounded_lengths(), st.floats(1e-9, 1 - 1e-9), st.floats(1e-9, 1 - 1e-9))
def test_lengths_stay_within_bounds_and_grow_with_their_quantile(
    bounded: tuple[Any, int, int], u: float, v: float
) -> None:
    value, low, high = bounded
    lengths = LENGTHS.validate_python(value)
    a, b = (lengths.tokens_at(share) for share in sorted((u, v)))
    assert low <= a <= b <= high
    assert low <= lengths.mean() <= high


@given(bounded_lengths(most=4000), st.sampled_from([2.0, 0.5, 0.25]))
def test_scaling_scales_every_quantile(bounded: tuple[Any, int, int], factor: float) -> None:
    lengths = LENGTHS.validate_python(bounded[0])
    for u in (0.01, 0.3, 0.5, 0.9, 0.999):
        scaled = lengths.scaled(factor).at(u)
        assert scaled == pytest.approx(factor * lengths.at(u), rel=1e-6, abs=0.5 + factor)


@given(
    bounded_lengths(),
    bounded_lengths(),
    st.floats(-0.9, 0.9, allow_subnormal=False),
    st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_means_of_many_requests_are_the_expected_ones(
    inputs: tuple[Any, int, int], outputs: tuple[Any, int, int], correlation: float, seed: int
) -> None:
    workload = Workload.model_validate(
        {
            "name": "w",
            "classes": [
                {"name": "c", "in": inputs[0], "out": outputs[0], "correlation": correlation}
            ],
        }
    )
    requests = workload.requests(seed=seed, count=2000, vocabulary=VOCABULARIES["byte_level_bpe"])
    means = workload.mean_lengths()
    for values, expected in zip(
        ([r.prompt_len for r in requests], [r.max_tokens for r in requests]), means, strict=True
    ):
        mean = sum(values) / len(values)
        deviation = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        assert abs(mean - expected) < 5 * deviation / 2000**0.5 + 0.01


@given(
    st.sampled_from(TOKENIZERS),
    bounded_lengths(),
    st.integers(0, 60),
    st.integers(1, 4),
    st.booleans(),
    st.none() | st.integers(20, 100),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_prompts_are_as_long_as_they_say_and_share_what_they_say(
    tokenizer: str,
    inputs: tuple[Any, int, int],
    prefix_len: int,
    num_prefixes: int,
    takes_token_ids: bool,
    max_model_len: int | None,
    seed: int,
) -> None:
    prefix = {"count": num_prefixes, "tokens": prefix_len} if prefix_len else None
    workload = Workload.model_validate(
        {
            "name": "w",
            "classes": [
                {"name": "a", "in": inputs[0], "out": 8, "prefix": prefix},
                {"name": "b", "in": 30, "out": {"uniform": [1, 9]}, "repetition": 0.5, "burst": 2},
            ],
        }
    )
    vocabulary = VOCABULARIES[tokenizer]
    options: dict[str, Any] = {
        "seed": seed,
        "count": 12,
        "vocabulary": vocabulary,
        "rate": 3.0,
        "takes_token_ids": takes_token_ids,
        "max_model_len": max_model_len,
    }
    requests = workload.requests(**options)
    assert workload.requests(**options) == requests
    encode = model_named(tokenizer).tokenizer.encode
    seen: list[tuple[int, ...]] = []
    for request in requests:
        ids = tuple(encode(request.prompt) if isinstance(request.prompt, str) else request.prompt)
        assert len(ids) == request.prompt_len
        assert max_model_len is None or len(ids) + request.max_tokens <= max_model_len
        known = max((agreeing(ids, other) for other in seen), default=0)
        # What the tokenizer adds is common to all; the first words may agree by chance.
        assert request.shared_len <= known <= request.shared_len + vocabulary.num_special + 12
        seen.append(ids)


def agreeing(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@given(st.floats(0.2, 5), st.floats(0.01, 1000), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_gamma_arrivals_have_their_rate_and_their_cv(shape: float, rate: float, seed: int) -> None:
    times = arrival_times(Gamma(burstiness=shape), rate=rate, count=20_000, seed=str(seed))
    seen = burstiness_of(times)
    assert seen is not None
    assert seen.rate == pytest.approx(rate, rel=0.1)
    assert seen.gap_cv == pytest.approx(shape**-0.5, rel=0.1)
