"""Guessing tokens changes how fast they come, never which ones: the default model, every method,
alone and in batches, chunks, and with preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.step import EngineStats
from support.real_prompts import PROMPTS
from support.speculative_settings import SETTINGS, settings_of

pytestmark = pytest.mark.real

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=MAX_TOKENS)
KNOBS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8}
NUM_BLOCKS = 20
"""Of 16 tokens: too few for as many prompts as may run."""


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    llm = LLM(**KNOBS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def greedy(plain: LLM) -> list[list[int]]:
    """Without speculation, one after another."""
    return [tokens(plain.generate([prompt], GREEDY))[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def seeded(plain: LLM) -> list[list[int]]:
    return tokens(plain.generate(PROMPTS, SEEDED))


@pytest.fixture(scope="module", params=SETTINGS)
def method(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Drafts of a fixed length, so that each step guesses."""
    return settings_of(request.param, tmp_path_factory.mktemp("heads")) | {"adaptive": False}


@pytest.fixture(scope="module")
def speculating(method: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(speculative_config=method, **KNOBS)
    yield llm
    llm.shutdown()


def num_drafted(stats: EngineStats) -> int:
    return sum(method.num_draft_tokens for method in stats.drafts)


def test_there_are_enough_prompts() -> None:
    assert len(set(PROMPTS)) >= 50


def test_alone(speculating: LLM, greedy: list[list[int]]) -> None:
    found = [tokens(speculating.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
    assert found == greedy
    assert num_drafted(speculating.get_metrics()) > 100


def test_eight_at_once(speculating: LLM, greedy: list[list[int]]) -> None:
    assert tokens(speculating.generate(PROMPTS, GREEDY)) == greedy


def test_with_a_seed(speculating: LLM, seeded: list[list[int]]) -> None:
    assert tokens(speculating.generate(PROMPTS, SEEDED)) == seeded


@pytest.mark.parametrize("budget", [24, 65])
def test_in_chunks(method: dict[str, Any], budget: int, greedy: list[list[int]]) -> None:
    llm = LLM(speculative_config=method, max_num_batched_tokens=budget, **KNOBS)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == greedy
    assert num_drafted(llm.get_metrics()) > 100
    llm.shutdown()


def test_after_preemption(
    method: dict[str, Any], greedy: list[list[int]], speculating: LLM
) -> None:
    knobs = KNOBS | {"max_model_len": 16 * NUM_BLOCKS, "max_num_seqs": 16}
    kv_bytes = NUM_BLOCKS * speculating.facts.block_bytes
    llm = LLM(speculative_config=method, kv_cache_memory_bytes=kv_bytes, **knobs)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == greedy
    assert llm.get_metrics().total_preemptions > 3
    llm.shutdown()


def test_the_controller_changes_no_token(greedy: list[list[int]], tmp_path: Path) -> None:
    both = [settings_of("ngram", tmp_path), settings_of("layer_skip", tmp_path)]
    llm = LLM(speculative_config=both, **KNOBS)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == greedy
    llm.shutdown()
