"""Guessed tokens in the Sampler: rows behind them, and guesses of its own. SPD-… name public bug
reports.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SlotBinding
from octavo.ops.backend import Backend
from octavo.sampling.sampler import DrawnRows, Sampler
from support.backends import BACKENDS, cpu_backend
from support.distributions import check_counts, expected_distribution, log_softmax
from support.sampling import bind, sample_once

V = 12
LOGITS = np.random.default_rng(3).normal(0, 2, V)
BEST = int(LOGITS.argmax())

EDITED: dict[str, Any] = {
    "prompt": (1, 2),
    "output": (3,),
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "eos": frozenset({BEST}),
    "bad_words": ((4, 5), (3, 4, 6)),
    "logit_bias": {7: 1.0},
    "logprobs": 2,
}
GUESSES = (4, 6, 4)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_rows_behind_guesses_are_those_of_a_sequence_with_these_tokens(
    backend: Backend, temperature: float
) -> None:
    """SPD-14: penalties, bad words and min_tokens see guessed tokens as output."""
    rows = np.random.default_rng(6).normal(0, 2, (5, V)).astype(np.float32)
    bindings = [bind(0, temperature=temperature, **EDITED), bind(1, seed=1)]
    together = Sampler(backend, max_num_seqs=2, vocab_size=V)
    stepwise = Sampler(backend, max_num_seqs=2, vocab_size=V)
    for sampler in (together, stepwise):
        for binding in bindings:
            sampler.bind(binding)
    sampled = together.sample(
        backend.from_host(rows.copy()),
        np.array([0, 0, 0, 0, 1]),
        np.array([3, 4, 5, 6, 1]),
        paths=[(), GUESSES[:1], GUESSES[:2], GUESSES, ()],
    )
    for row in range(4):
        alone = stepwise.sample(
            backend.from_host(rows[row : row + 1].copy()), np.array([0]), np.array([3 + row])
        )
        assert sampled.token_ids[row] == alone.token_ids[0]
        assert sampled.logprobs[row] == alone.logprobs[0]
        if row < 3:
            stepwise.observe(0, GUESSES[row : row + 1])
    assert sampled.logprobs.keys() == {0, 1, 2, 3}
    again = together.sample(backend.from_host(rows[:1].copy()), np.array([0]), np.array([3]))
    assert again.token_ids[0] == sampled.token_ids[0]  # nothing was noted


def test_drafts_are_drawn_for_random_requests_without_a_users_seed(backend: Backend) -> None:
    sampler = Sampler(backend, max_num_seqs=4, vocab_size=V)
    sampler.bind(bind(0))
    sampler.bind(bind(1, temperature=0.0))
    sampler.bind(SlotBinding(2, (0,), 1, SamplingParams(seed=3), 3, frozenset(), ()))
    sampler.bind(bind(3, top_k=1))
    assert sampler.draws(np.array([3, 2, 1, 0, 0])).tolist() == [False, False, False, True, True]


def test_drafted_tokens(backend: Backend) -> None:
    sampler = Sampler(backend, max_num_seqs=2, vocab_size=V)
    params: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "logit_bias": {BEST: -100.0}}
    sampler.bind(bind(0, seed=1, **params))
    sampler.bind(bind(1, **params | {"temperature": 0.0}))
    count = 400
    slots, positions = np.arange(2).repeat(count), np.tile(np.arange(1, count + 1), 2)
    logits = np.tile(LOGITS, (2 * count, 1)).astype(np.float32)
    drafted = sampler.draft(backend.from_host(logits), slots, positions, depth=0)
    assert set(drafted.token_ids[count:].tolist()) == {BEST}  # as the draft has it: no bias
    p = np.exp(log_softmax(LOGITS))
    assert drafted.confidences[count:] == pytest.approx(p[BEST], abs=1e-5)

    assert drafted.probabilities.keys() == set(range(count))
    q = expected_distribution(LOGITS, 0.7, top_k=5)
    assert drafted.probabilities[7] == pytest.approx(q, abs=1e-5)
    assert drafted.confidences[:count] == pytest.approx(q.max(), abs=1e-5)
    check_counts(np.bincount(drafted.token_ids[:count], minlength=V)[None], q[None])

    deeper = sampler.draft(backend.from_host(logits), slots, positions, depth=1)
    assert (deeper.token_ids[:count] != drafted.token_ids[:count]).any()
    again = sampler.draft(backend.from_host(logits), slots, positions, depth=0)
    assert again.token_ids.tolist() == drafted.token_ids.tolist()


@pytest.mark.parametrize("width", [V - 4, V + 5])
def test_spd_11_drafts_by_logits_of_another_width(backend: Backend, width: int) -> None:
    sampler = Sampler(backend, max_num_seqs=2, vocab_size=V)
    sampler.bind(bind(0))
    sampler.bind(bind(1, temperature=0.0))
    logits = np.zeros((2, width), np.float32)
    logits[:, V:] = 50.0
    slots, positions = np.array([0, 1]), np.array([1, 1])
    drafted = sampler.draft(backend.from_host(logits), slots, positions, depth=0)
    known = min(width, V)
    assert (drafted.token_ids < known).all()
    assert drafted.confidences == pytest.approx(1 / known)
    expected = np.where(np.arange(V) < known, 1 / known, 0)
    assert drafted.probabilities[0] == pytest.approx(expected)


def test_a_broken_draft_guesses_something_without_confidence(backend: Backend) -> None:
    sampler = Sampler(backend, max_num_seqs=2, vocab_size=V)
    sampler.bind(bind(0))
    sampler.bind(bind(1, temperature=0.0))
    logits = np.full((2, V), np.nan, np.float32)
    slots, positions = np.array([0, 1]), np.array([1, 1])
    drafted = sampler.draft(backend.from_host(logits), slots, positions, depth=0)
    assert ((drafted.token_ids >= 0) & (drafted.token_ids < V)).all()
    assert drafted.confidences[1] == 0
    assert drafted.probabilities[0][drafted.token_ids[0]] == 1


def test_drawn_rows_keep_their_guess_or_replace_it(backend: Backend) -> None:
    sampler = Sampler(backend, max_num_seqs=1, vocab_size=V)
    sampler.bind(bind(0, logprobs=1, top_k=2))
    second = int(LOGITS.argsort()[-2])
    never = int(LOGITS.argmin())
    certain = np.eye(V, dtype=np.float32)
    sampled = sampler.sample(
        backend.from_host(np.tile(LOGITS, (4, 1)).astype(np.float32)),
        np.zeros(4, np.int64),
        np.arange(1, 5),
        paths=[(), (never,), (never, BEST), (never, BEST, BEST)],
        drawn=DrawnRows(
            rows=np.array([0, 1, 2]),
            token_ids=np.array([never, BEST, BEST]),
            probabilities=np.stack(
                [certain[never], expected_distribution(LOGITS, top_k=2), certain[never]]
            ).astype(np.float32),
        ),
    )
    assert sampled.token_ids[0] in (BEST, second)  # the filters leave no other
    assert sampled.token_ids[1] == BEST  # as likely as guessed: always accepted
    plain = sample_once(backend, LOGITS[None], [bind(0, prompt=(0,) * 4, top_k=2)])
    assert sampled.token_ids[3] == plain.token_ids[0]
    for row, record in sampled.logprobs.items():
        assert record.token_id == sampled.token_ids[row]
        assert record.logprob == pytest.approx(log_softmax(LOGITS)[record.token_id], abs=1e-5)
    assert sampled.logprobs.keys() == {0, 1, 2, 3}


def test_broken_logits_behind_guesses_are_not_reported_yet(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = Sampler(backend, max_num_seqs=1, vocab_size=V)
    sampler.bind(bind(0))
    logits = np.tile(LOGITS, (3, 1)).astype(np.float32)
    logits[1:] = np.nan
    with caplog.at_level(logging.WARNING, logger="octavo"):
        sampled = sampler.sample(
            backend.from_host(logits),
            np.zeros(3, np.int64),
            np.arange(1, 4),
            paths=[(), (1,), (1, 2)],
            drawn=DrawnRows(np.arange(2), np.array([1, 2]), np.eye(V, dtype=np.float32)[1:3]),
        )
    assert sampled.errors.keys() == {1, 2}
    assert not sampled.refused
    assert not caplog.records
