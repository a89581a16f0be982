"""What one call of the Sampler may and may not choose. SMP-… and MDL-… name public bug reports."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from octavo.ops.backend import Backend
from octavo.sampling.sampler import Sampler
from support.backends import BACKENDS, cpu_backend, torch_backend
from support.distributions import log_softmax
from support.sampling import TableModel, bind, sample_once
from support.stored_arrays import load_weight

V = 12
LOGITS = np.random.default_rng(3).normal(0, 2, V)
BEST = int(LOGITS.argmax())


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


def choose(
    backend: Backend, seeds: int = 20, logits: np.ndarray = LOGITS, **params: Any
) -> list[int]:
    """The tokens that `seeds` different seeds choose from the same logits."""
    bindings = [bind(slot, seed=slot, **params) for slot in range(seeds)]
    sampled = sample_once(backend, np.tile(logits, (seeds, 1)), bindings)
    assert not sampled.errors
    return sampled.token_ids.tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 0.0])
def test_smp_01_tiny_temperatures_choose_the_greedy_token(
    backend: Backend, temperature: float
) -> None:
    assert set(choose(backend, temperature=temperature)) == {BEST}
    large = np.roll(np.arange(V) * 16 + 3e4, 5).astype(np.float16)
    assert set(choose(backend, logits=large, temperature=temperature)) == {int(large.argmax())}


def test_smp_05_one_seed_gives_one_token_in_every_slot_and_company(backend: Backend) -> None:
    model = TableModel(backend, V)
    twins = [bind(0, seed=7), bind(5, seed=7)]
    (first, second), _ = model.generate(twins, 12)
    assert first == second
    company = [bind(slot, seed=slot, prompt=(slot,)) for slot in (1, 3)]
    together, _ = model.generate([*company, bind(4, seed=7)], 12)
    assert together[2] == first
    other, _ = model.generate([bind(0, seed=8)], 12)
    assert other[0] != first


def test_smp_09_smallest_top_p_is_greedy_and_min_p_zero_is_off(backend: Backend) -> None:
    assert set(choose(backend, top_p=1e-9)) == {BEST}
    assert choose(backend, seeds=200, min_p=0.0) == choose(backend, seeds=200)
    assert set(choose(backend, min_p=1.0)) == {BEST}


def test_smp_10_spellings_of_top_k(backend: Backend) -> None:
    unlimited = choose(backend, seeds=200)
    assert len(set(unlimited)) > 2
    for top_k in (0, -1, V, V + 10, 2**31 - 1):
        assert choose(backend, seeds=200, top_k=top_k) == unlimited
    assert set(choose(backend, top_k=1)) == {BEST}


def test_smp_12_a_penalty_acts_on_its_own_row_in_any_order(backend: Backend) -> None:
    model = TableModel(backend, V)
    penalised = {"prompt": (1, 2, 3), "repetition_penalty": 2.0, "temperature": 0.0}
    seeded = {"prompt": (4,), "seed": 9, "top_k": 1}
    (alone,), _ = model.generate([bind(**penalised)], 10)
    (other_alone,), _ = model.generate([bind(**seeded)], 10)
    assert alone != model.generate([bind(prompt=(1, 2, 3), temperature=0.0)], 10)[0][0]
    together, _ = model.generate([bind(0, **penalised), bind(1, **seeded)], 10)
    assert together == [alone, other_alone]
    together, _ = model.generate([bind(0, **seeded), bind(1, **penalised)], 10)
    assert together == [other_alone, alone]


def test_smp_16_a_bias_moves_the_greedy_token(backend: Backend) -> None:
    other = (BEST + 1) % V
    bindings = [
        bind(0, temperature=0.0),
        bind(1, temperature=0.0, logit_bias={BEST: -100.0}),
        bind(2, temperature=0.0, logit_bias={other: 100.0}),
        bind(3, temperature=1.0, logit_bias={other: 100.0}),
    ]
    tokens = sample_once(backend, np.tile(LOGITS, (4, 1)), bindings).token_ids.tolist()
    assert tokens[0] == BEST
    assert tokens[1] == int(np.where(np.arange(V) == BEST, -np.inf, LOGITS).argmax())
    assert tokens[2:] == [other, other]
    assert BEST not in choose(backend, logit_bias={BEST: -100.0})


def test_mdl_13_broken_logits_end_their_own_sequence_alone(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    logits = np.tile(LOGITS, (6, 1))
    logits[1, 4] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    logits[4, :3] = -np.inf  # legal: tokens that the model rules out
    params: list[dict[str, Any]] = [{"temperature": 0.0}] * 5 + [{"seed": 3, "logprobs": 1}]
    bindings = [bind(slot, prompt=(0, 0), **p) for slot, p in enumerate(params)]
    with caplog.at_level(logging.WARNING, logger="octavo"):
        sampled = sample_once(backend, logits, bindings)
    assert sampled.errors == dict.fromkeys(
        (1, 2, 3), "the model produced non-finite logits at position 2"
    )
    assert len(caplog.records) == 3
    assert "non-finite logits" in caplog.text
    alone = sample_once(backend, logits[5:], [bind(0, prompt=(0, 0), seed=3, logprobs=1)])
    assert sampled.token_ids[0] == sampled.token_ids[4] == BEST
    assert sampled.token_ids[5] == alone.token_ids[0]
    assert sampled.logprobs[5] == alone.logprobs[0]


def test_allowed_tokens_are_the_only_ones(backend: Backend) -> None:
    allowed = sorted(LOGITS.argsort()[:2].tolist())
    assert sorted(set(choose(backend, seeds=100, allowed_token_ids=allowed))) == allowed
    greedy = max(allowed, key=lambda token: LOGITS[token])
    assert set(choose(backend, allowed_token_ids=allowed, temperature=0.0)) == {greedy}


def test_bad_words_are_never_completed(backend: Backend) -> None:
    model = TableModel(backend, V)
    (free,), _ = model.generate([bind(temperature=0.0)], 2)
    pair = (free[0], free[1])
    single = next(token for token in range(V) if token not in pair)
    (tokens,), _ = model.generate([bind(bad_words=(pair, (single,)), temperature=0.0)], 2)
    assert tokens[0] == free[0]
    assert tokens[1] not in (free[1], single)
    (tokens,), _ = model.generate([bind(bad_words=(pair, (single,)), seed=1)], 200)
    assert set(pair) <= set(tokens)
    assert pair not in pairwise(tokens)
    assert single not in tokens


def test_min_tokens_holds_end_of_sequence_back(backend: Backend) -> None:
    model = TableModel(backend, V)
    model.table[:, 7] = 50.0
    params: dict[str, Any] = {"eos": frozenset({7}), "min_tokens": 3, "temperature": 0.0}
    (tokens,), _ = model.generate([bind(**params)], 4)
    assert [token == 7 for token in tokens] == [False, False, False, True]
    (resumed,), _ = model.generate([bind(output=tuple(tokens[:2]), **params)], 2)
    assert resumed == tokens[2:]
    (stop_token_allowed,), _ = model.generate(
        [bind(stop_token_ids=[7], min_tokens=3, temperature=0.0)], 1
    )
    assert stop_token_allowed == [7]


def test_a_request_that_forbids_everything_ends_alone(backend: Backend) -> None:
    bindings = [
        bind(0, temperature=0.0),
        bind(1, allowed_token_ids=[7], eos=frozenset({7}), min_tokens=1),
    ]
    sampled = sample_once(backend, np.tile(10 * LOGITS, (2, 1)), bindings)
    assert sampled.errors.keys() == {1}
    assert sampled.errors[1].startswith("no token is possible at position 1: allowed_token_ids")
    assert sampled.refused == {1}
    assert sampled.token_ids[0] == BEST


def test_logprobs_are_of_the_unmodified_distribution(backend: Backend) -> None:
    bindings = [
        bind(0, logprobs=2, temperature=0.3, logit_bias={BEST: -100.0}, seed=1),
        bind(1, temperature=0.0),
        bind(2, logprobs=0, top_k=1),
        bind(3, logprobs=-1, repetition_penalty=3.0, prompt=(BEST,), seed=4),
        bind(4, logprobs=V + 5, temperature=0.0),
    ]
    rows = np.stack([np.roll(LOGITS, row) for row in range(5)])
    sampled = sample_once(backend, rows, bindings)
    assert sampled.logprobs.keys() == {0, 2, 3, 4}
    for row, num_top in ((0, 2), (2, 0), (3, V), (4, V)):
        expected = log_softmax(rows[row])
        order = np.argsort(-expected)
        record = sampled.logprobs[row]
        assert record.token_id == sampled.token_ids[row]
        assert record.logprob == pytest.approx(expected[record.token_id], abs=1e-5)
        assert record.rank == 1 + int((expected > expected[record.token_id]).sum())
        assert [token for token, _ in record.top] == order[:num_top].tolist()
        assert [logprob for _, logprob in record.top] == pytest.approx(
            expected[order[:num_top]].tolist(), abs=1e-5
        )


def test_logprobs_of_a_whole_batch_without_edits(backend: Backend) -> None:
    bindings = [bind(slot, logprobs=1, temperature=0.0) for slot in range(3)]
    sampled = sample_once(backend, np.tile(LOGITS, (3, 1)), bindings)
    assert [sampled.logprobs[row].rank for row in range(3)] == [1, 1, 1]
    assert sampled.logprobs[0].top == ((BEST, sampled.logprobs[0].logprob),)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits(dtype: str) -> None:
    """Of torch on GPUs; the native backend's are float32."""
    backend = torch_backend()
    sampler = Sampler(backend, max_num_seqs=4, vocab_size=V)
    other = (BEST + 1) % V
    for binding in (
        bind(0, temperature=0.0),
        bind(1, temperature=0.0, logit_bias={other: 100.0}),
        bind(2, allowed_token_ids=[other], logprobs=1),
        bind(3, prompt=(BEST,), repetition_penalty=1.5, presence_penalty=1.0, seed=2),
    ):
        sampler.bind(binding)
    (logits,) = load_weight(backend, np.tile(LOGITS, (4, 1)), dtype=dtype)
    sampled = sampler.sample(logits, np.arange(4), np.ones(4, np.int64))
    assert not sampled.errors
    assert sampled.token_ids.tolist()[:3] == [BEST, other, other]
    assert sampled.logprobs[2].top[0][0] == BEST
    assert sampled.logprobs[2].logprob == pytest.approx(log_softmax(LOGITS)[other], abs=0.05)


def test_rebinding_a_slot_forgets_everything(backend: Backend) -> None:
    sampler = Sampler(backend, max_num_seqs=1, vocab_size=V)
    demands: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}
    sampler.bind(bind(0, logprobs=3, logit_bias={BEST: -100.0}, seed=5, **demands))
    slots, positions = np.array([0]), np.array([1])
    logits = LOGITS[None].astype(np.float32)
    first = sampler.sample(backend.from_host(logits), slots, positions)
    assert first.token_ids.tolist() != [BEST]
    assert first.logprobs.keys() == {0}
    sampler.bind(bind(0, temperature=0.0))
    second = sampler.sample(backend.from_host(LOGITS[None].astype(np.float32)), slots, positions)
    assert second.token_ids.tolist() == [BEST]
    assert not second.logprobs


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5])
def test_smp_01_a_gap_of_20_temperatures_is_greedy(backend: Backend, temperature: float) -> None:
    logits = np.array([0.0, 1.0, 1.0 + 25 * temperature, -1.0])
    bindings = [bind(slot, seed=slot, temperature=temperature) for slot in range(300)]
    sampled = sample_once(backend, np.tile(logits, (300, 1)), bindings)
    assert set(sampled.token_ids.tolist()) == {2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
def test_smp_01_large_half_precision_logits(temperature: float) -> None:
    backend = torch_backend()
    large = np.roll(np.arange(V) * 16 + 3e4, 5).astype(np.float32)  # exact in float16
    sampler = Sampler(backend, max_num_seqs=8, vocab_size=V)
    for slot in range(8):
        sampler.bind(bind(slot, seed=slot, temperature=temperature))
    (logits,) = load_weight(backend, np.tile(large, (8, 1)), dtype="float16")
    sampled = sampler.sample(logits, np.arange(8), np.ones(8, np.int64))
    assert not sampled.errors
    assert set(sampled.token_ids.tolist()) == {int(large.argmax())}
