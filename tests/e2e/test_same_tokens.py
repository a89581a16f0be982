"""One matrix: tokens, greedy or seeded, do not depend on batch mates, batching, chunking, prefix
hits, reserved memory, preemption, n or guesses.

On tiny random models on a CPU, through the whole engine: each row is computed independently of its
batch there, whatever the bits of weights and cache and the number of threads, so the tokens must be
equal, without a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from support.checkpoints import VOCAB_SIZE, make_checkpoint

FAMILIES = ("llama", "qwen3", "gemma3_text")
MAX_TOKENS = 24
NUM_BLOCKS = 16

ENGINES: dict[str, dict[str, object]] = {
    "float32": {"backend": "native", "dtype": "float32"},
    "8 bits": {"backend": "native", "quantization": "int8", "kv_cache_dtype": "int8"},
    "4 bits": {"backend": "native", "quantization": "int4", "kv_cache_dtype": "fp8"},
    "torch": {"backend": "torch", "device": "cpu"},
}
MODELS = [
    *(("float32", family) for family in FAMILIES),
    *(("8 bits", family) for family in FAMILIES),
    ("float32", "bloom"),  # linear biases
    ("4 bits", "gpt2"),  # positions in a table
    ("float32", "deepseek_v3"),
    ("8 bits", "qwen2_moe"),
    ("4 bits", "gemma3_text"),
    ("torch", "llama"),
]
SEEDED_MODELS = [("float32", "llama"), ("4 bits", "gemma3_text"), ("torch", "llama")]
"""Where tokens are drawn, too: from logits on, all models go the same way."""

rng = random.Random(5)
SHARED = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
PROMPTS = [
    # Lengths around the edges of a block of 16, some behind a shared beginning.
    (SHARED if i % 3 == 0 else []) + [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    for i, length in enumerate([1, 2, 7, 15, 16, 17, 31, 32, 33, 40, 48, 50, 63, 64, 65, 100])
]
LONGEST = max(map(len, PROMPTS)) + MAX_TOKENS
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.2,
    top_p=0.95,
    top_k=40,
    frequency_penalty=0.3,
    seed=17,
    max_tokens=MAX_TOKENS,
    ignore_eos=True,
)

ITSELF = "itself"
"""Stands for the model's own folder."""


def guessing(method: str, **settings: object) -> dict[str, object]:
    """With drafts of four tokens wherever they can be."""
    fixed = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    return {"speculative_config": fixed | settings}


BLOCKS_OF_4 = "blocks of 4"
DRAFT_MODEL = "a draft model guesses"
CASES: dict[str, dict[str, object]] = {
    "together": {},
    "without prefix cache": {"enable_prefix_caching": False},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 33, no prefix cache": {
        "max_num_batched_tokens": 33,
        "enable_prefix_caching": False,
    },
    BLOCKS_OF_4: {"block_size": 4},
    "three at a time": {"max_num_seqs": 3},
    "static batches of 3": {"batching": "static", "max_num_seqs": 3},
    "reserved memory": {"kv_policy": "reserve-max"},
    "whole prompts": {
        "enable_chunked_prefill": False,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": LONGEST,
    },
    "one thread": {"threads": 1},
    "n-grams guess": guessing("ngram", prompt_lookup_min=1),
    "suffixes guess": guessing("suffix"),
    "the first layer guesses": guessing("layer_skip", num_layers=1),
    DRAFT_MODEL: guessing("draft_model", model=ITSELF),
}


class Model(NamedTuple):
    folder: Path
    knobs: dict[str, object]

    def load(self, **knobs: object) -> LLM:
        settings = knobs.get("speculative_config")
        if isinstance(settings, dict) and settings.get("model") == ITSELF:
            knobs = {**knobs, "speculative_config": settings | {"model": str(self.folder)}}
        return LLM(str(self.folder), **self.knobs, **knobs)


class Run(NamedTuple):
    model: Model
    params: SamplingParams


@pytest.fixture(
    scope="module",
    params=[
        *((engine, family, GREEDY) for engine, family in MODELS),
        *((engine, family, SEEDED) for engine, family in SEEDED_MODELS),
    ],
    ids=lambda param: "-".join((*param[:2], "seeded" if param[2] is SEEDED else "greedy")),
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    engine, family, params = request.param
    folder = make_checkpoint(family, tmp_path_factory.mktemp(family))
    return Run(Model(folder, ENGINES[engine]), params)


@pytest.fixture(scope="module")
def model(run: Run) -> Model:
    return run.model


@pytest.fixture(scope="module")
def params(run: Run) -> SamplingParams:
    return run.params


@pytest.fixture(scope="module")
def alone(model: Model, params: SamplingParams) -> Iterator[list[list[int]]]:
    """Each prompt by itself, computed whole, nothing cached."""
    llm = model.load(enable_prefix_caching=False)
    yield [tokens(llm.generate([prompt], params))[0] for prompt in PROMPTS]
    llm.shutdown()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_equal_to(alone: list[list[int]], found: list[list[int]]) -> None:
    for prompt, expected, got in zip(PROMPTS, alone, found, strict=True):
        assert got == expected, f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("case", CASES)
def test_settings(case: str, model: Model, params: SamplingParams, alone: list[list[int]]) -> None:
    if case == BLOCKS_OF_4 and "quantization" in model.knobs:
        pytest.skip("sums of another order are rounded to other bits; there's no promise")
    llm = model.load(**CASES[case])
    assert_equal_to(alone, tokens(llm.generate(PROMPTS, params)))
    if "speculative_config" in CASES[case]:
        # Once more, with what was said before to guess from.
        assert_equal_to(alone, tokens(llm.generate(PROMPTS, params)))
        assert llm.get_metrics().all_drafts.num_draft_tokens > 100
    llm.shutdown()


def test_prefix_hits(model: Model, params: SamplingParams, alone: list[list[int]]) -> None:
    llm = model.load()
    llm.generate(PROMPTS, params)
    again = llm.generate(PROMPTS, params)
    assert sum(output.num_cached_tokens for output in again) > 500
    assert_equal_to(alone, tokens(again))
    llm.shutdown()


@pytest.fixture(scope="module")
def block_bytes(model: Model) -> int:
    llm = model.load(max_num_seqs=1)
    llm.shutdown()
    return llm.facts.block_bytes


SCARCE: dict[str, dict[str, object]] = {
    "no chunks": {"max_num_batched_tokens": 2048},
    "chunks": {"max_num_batched_tokens": 20},
    "no chunks, no prefix cache": {
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    },
    "chunks, no prefix cache": {"max_num_batched_tokens": 20, "enable_prefix_caching": False},
    "static batches": {"max_num_batched_tokens": 20, "batching": "static"},
    "whole prompts": {"max_num_batched_tokens": LONGEST, "enable_chunked_prefill": False},
    "the first layer guesses": {
        "max_num_batched_tokens": 20,
        **guessing("layer_skip", num_layers=1),
    },
    DRAFT_MODEL: {"max_num_batched_tokens": 20, **guessing("draft_model", model=ITSELF)},
}


@pytest.mark.parametrize("case", SCARCE)
def test_preemption_with_n(
    case: str, model: Model, params: SamplingParams, alone: list[list[int]], block_bytes: int
) -> None:
    """Everything at once: chunks, three sequences a prompt, and too few blocks for all."""
    num_caches = 2 if case == DRAFT_MODEL else 1
    kv_bytes = num_caches * NUM_BLOCKS * block_bytes
    llm = model.load(max_model_len=LONGEST, kv_cache_memory_bytes=kv_bytes, **SCARCE[case])
    assert llm.facts.num_blocks == NUM_BLOCKS
    found = llm.generate(PROMPTS, replace(params, n=3))
    assert_equal_to(alone, tokens(found))
    if params.temperature == 0:
        for index in (1, 2):
            assert_equal_to(alone, [o.outputs[index].token_ids for o in found])
    else:
        assert all(o.outputs[0].token_ids != o.outputs[1].token_ids for o in found)
    assert llm.get_metrics().total_preemptions > 0
    assert llm.get_metrics().kv_usage == 0.0
    llm.shutdown()
