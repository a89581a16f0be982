"""Sampled frequencies against the distribution that the parameters define, with fixed seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.backend import Backend
from support.backends import BACKENDS, cpu_backend
from support.distributions import check_counts, expected_distribution, softmax
from support.sampling import TableModel, bind, sample_once

V = 16
LOGITS = np.random.default_rng(5).normal(0, 1.5, V)
DRAWS = 4000


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


def check_frequencies(tokens: np.ndarray, expected: np.ndarray) -> None:
    check_counts(np.bincount(tokens, minlength=V)[None], expected[None])


def draw(backend: Backend, **params: Any) -> np.ndarray:
    bindings = [bind(slot, seed=slot + 1000, **params) for slot in range(DRAWS)]
    sampled = sample_once(backend, np.tile(LOGITS, (DRAWS, 1)), bindings)
    assert not sampled.errors
    return sampled.token_ids


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 4, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.15),
        (1.3, 8, 0.8, 0.05),
    ],
)
def test_frequencies(
    backend: Backend, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    tokens = draw(backend, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check_frequencies(tokens, expected_distribution(LOGITS, temperature, top_k, top_p, min_p))


def test_the_test_can_tell_distributions_apart(backend: Backend) -> None:
    tokens = draw(backend, temperature=1.0)
    with pytest.raises(AssertionError):
        check_frequencies(tokens, expected_distribution(LOGITS, 1.1, 0, 1.0, 0.0))


def test_frequencies_under_penalties_and_bias(backend: Backend) -> None:
    best, second, third = np.argsort(-LOGITS)[:3].tolist()
    tokens = draw(
        backend,
        prompt=(best, third),
        output=(second, second),
        repetition_penalty=1.7,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={third: 0.9},
    )
    logits = LOGITS.copy()
    for token in (best, second, third):
        logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
    logits[second] -= 0.4 + 2 * 0.3
    logits[third] += 0.9
    check_frequencies(tokens, softmax(logits))


def test_frequencies_along_one_sequences_positions(backend: Backend) -> None:
    # The positions of one stream must be as independent as different seeds.
    logits = np.tile(LOGITS, (DRAWS, 1))
    bindings = [bind(slot, seed=42, prompt=(0,) * (slot + 1)) for slot in range(DRAWS)]
    tokens = sample_once(backend, logits, bindings).token_ids
    check_frequencies(tokens, softmax(LOGITS))


sampling_params = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "prompt": st.lists(st.integers(0, V - 1), min_size=1, max_size=4).map(tuple),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([0.6, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {3: 2.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "eos": st.just(frozenset({2})),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(sampling_params, min_size=2, max_size=5),
    slots=st.permutations(range(8)),
    cut=st.integers(1, 5),
)
def test_a_sequence_is_the_same_alone_in_company_and_resumed(
    backend: Backend, requests: list[dict[str, Any]], slots: list[int], cut: int
) -> None:
    model = TableModel(backend, V)
    bindings = [bind(slot, **request) for slot, request in zip(slots, requests, strict=False)]
    together, logprobs = model.generate(bindings, 6)
    for index, request in enumerate(requests):
        alone, alone_logprobs = model.generate([bind(0, **request)], 6)
        assert together[index] == alone[0]
        assert logprobs[index] == alone_logprobs[0]
        resumed, _ = model.generate([bind(1, output=tuple(alone[0][:cut]), **request)], 6 - cut)
        assert alone[0][cut:] == resumed[0]
