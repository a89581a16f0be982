"""Layouts of worker processes times what an engine does: the tokens are those of one process,
whatever is cut into chunks, found in the prefix cache, preempted, guessed, drawn or rounded.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.errors import ConfigError
from octavo.core.step import EngineStats
from octavo.llm import CompletionOutput
from octavo.speculative.registry import methods
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.draft_heads import CONFIG, eagle3_tensors, eagle_tensors, medusa_tensors, save_head
from support.forked_workers import workers_are_forked

LAYOUTS: dict[str, dict[str, int]] = {
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "TP=2 x PP=2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 6}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 4}),  # latent attention and experts
}
TOLERANCE = 2e-4
"""Of log-probabilities on tensor ranks; those of stages have the same bits."""

MAX_TOKENS = 12
rng = random.Random(8)
SHARED = [rng.randrange(3, VOCAB_SIZE) for _ in range(33)]
PROMPTS = [
    (SHARED if i % 3 == 0 else []) + [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    for i, length in enumerate([1, 7, 16, 17, 31, 33, 40, 48, 64])
]
LONGEST = max(map(len, PROMPTS)) + MAX_TOKENS
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(
    n=3,
    temperature=1.1,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    seed=17,
    max_tokens=MAX_TOKENS,
    ignore_eos=True,
    logprobs=3,
)
PARAMS = [GREEDY if i % 2 else DRAWN for i in range(len(PROMPTS))]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "worker_timeout": 60.0,  # tests may share their CPUs with others
    "max_model_len": LONGEST,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 20,
}
FEW_BLOCKS = 14
"""Of which the longest sequence takes 8."""

Folder = Callable[[str], Path]
Alone = Callable[..., list[RequestOutput]]


@pytest.fixture(scope="module", autouse=True)
def _quick_starts() -> Iterator[None]:
    with workers_are_forked():
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    @cache
    def make(model: str) -> Path:
        family, overrides = MODELS[model]
        return make_checkpoint(family, tmp_path_factory.mktemp(family), **overrides)

    return make


@pytest.fixture(scope="module")
def alone(folder_of: Folder) -> Alone:
    """What one process makes of the prompts, with room for all of them."""

    @cache
    def make(model: str, kv_cache_dtype: str = "auto") -> list[RequestOutput]:
        settings = SETTINGS | {"kv_cache_dtype": kv_cache_dtype}
        llm = LLM(str(folder_of(model)), kv_cache_memory_bytes=4 << 20, **settings)
        found = generate(llm)
        llm.shutdown()
        return found

    return make


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


class Ran(NamedTuple):
    outputs: list[RequestOutput]
    stats: EngineStats
    num_blocks: int


def check_near(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    check_same(found, expected, TOLERANCE)


def check_same(
    found: list[RequestOutput], expected: list[RequestOutput], tolerance: float = 0.0
) -> None:
    for prompt, got, one in zip(PROMPTS, found, expected, strict=True):
        for ours, theirs in zip(got.outputs, one.outputs, strict=True):
            assert ours.error is None
            assert ours.token_ids == theirs.token_ids, f"prompt of {len(prompt)} tokens"
            for place in range(MAX_TOKENS):
                np.testing.assert_allclose(
                    likely(ours, place), likely(theirs, place), rtol=0, atol=tolerance
                )


def likely(output: CompletionOutput, place: int) -> list[float]:
    """Log-probabilities there."""
    assert output.logprobs is not None
    return [one.logprob for one in output.logprobs[place].values()]


def run(
    folder: Path,
    layout: str,
    expected: list[RequestOutput],
    check: Callable[[list[RequestOutput], list[RequestOutput]], None] | None = None,
    **settings: Any,
) -> Ran:
    """Twice the same, the second time with prefixes and texts to go by; what came of that."""
    if check is None:
        check = check_near if "TP" in layout else check_same
    llm = LLM(str(folder), **(SETTINGS | settings), **LAYOUTS[layout])
    try:
        for _ in range(2):
            found = generate(llm)
            check(found, expected)
        return Ran(found, llm.get_metrics(), llm.facts.num_blocks)
    finally:
        llm.shutdown()


def few_blocks(folder: Path, layout: str, **settings: Any) -> int:
    """Bytes for each worker's cache: its part of FEW_BLOCKS."""
    llm = LLM(str(folder), **(SETTINGS | settings))
    llm.shutdown()
    sizes = dict(LAYOUTS[layout])
    if "deepseek" in (folder / "config.json").read_text():
        sizes.pop("tensor_parallel_size", None)  # all ranks have the latent vectors
    return FEW_BLOCKS * llm.facts.block_bytes // math.prod(sizes.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_chunks_prefix_hits_and_preemption(
    model: str, layout: str, folder_of: Folder, alone: Alone
) -> None:
    folder = folder_of(model)
    few = few_blocks(folder, layout)
    found, stats, num_blocks = run(folder, layout, alone(model), kv_cache_memory_bytes=few)
    assert num_blocks == FEW_BLOCKS
    assert stats.total_preemptions > 0
    assert sum(output.num_cached_tokens for output in found) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_cache_of_8_bits(model: str, layout: str, folder_of: Folder, alone: Alone) -> None:
    settings = {"kv_cache_dtype": "int8", "kv_cache_memory_bytes": 2 << 20}
    expected = alone(model, "int8")
    check = check_rounded if "TP" in layout else check_same
    ran = run(folder_of(model), layout, expected, check, **settings)
    assert sum(output.num_cached_tokens for output in ran.outputs) > 100


def check_rounded(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """What ranks add up in another order is now and then rounded to the other one of two values of
    8 bits: log-probabilities are off by up to 0.005, and one text or another goes on otherwise.
    """
    num_equal = []
    for got, one in zip(found, expected, strict=True):
        for ours, theirs in zip(got.outputs, one.outputs, strict=True):
            pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
            equal = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_equal.append(len(equal))
            for place in range(len(equal)):
                np.testing.assert_allclose(
                    likely(ours, place), likely(theirs, place), rtol=0, atol=0.03
                )
    assert num_equal.count(MAX_TOKENS) >= 0.9 * len(num_equal)


# --- guesses -----------------------------------------------------------------------------------


def eagle(folder: Path) -> dict[str, Any]:
    """Without a head of its own: rows of the target's."""
    tensors = eagle_tensors(num_draft_tokens=300)
    return {"model": str(save_head(folder, tensors, CONFIG | {"draft_vocab_size": 300}))}


def eagle3(folder: Path) -> dict[str, Any]:
    """It sees layers of both stages."""
    config = {"draft_vocab_size": 300, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    return {"model": str(save_head(folder, eagle3_tensors(), CONFIG | config))}


def medusa(folder: Path) -> dict[str, Any]:
    config = CONFIG | {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return {"model": str(save_head(folder, medusa_tensors(has_lm_heads=False), config))}


def draft_model(folder: Path) -> dict[str, Any]:
    """The target once more: all that it guesses greedily is right."""
    return {"model": str(make_checkpoint("llama", folder, num_hidden_layers=6))}


GUESSING: dict[str, Callable[[Path], dict[str, Any]]] = {
    "draft_model": draft_model,
    "eagle": eagle,
    "eagle3": eagle3,
    "layer_skip": lambda folder: {"num_layers": 5},
    "medusa": medusa,
    "ngram": lambda folder: {"prompt_lookup_min": 1},
    "suffix": lambda folder: {},
}


def test_every_method_is_here() -> None:
    assert tuple(sorted(GUESSING)) == methods()


def guessing(method: str, folder: Path) -> dict[str, Any]:
    """With drafts of four tokens wherever they can be."""
    fixed = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    return {"speculative_config": fixed | GUESSING[method](folder)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", GUESSING)
def test_guesses(method: str, layout: str, folder_of: Folder, alone: Alone, tmp_path: Path) -> None:
    """With chunks, prefix hits and preemption."""
    folder, settings = folder_of("llama"), guessing(method, tmp_path / "guesses")
    if method == "layer_skip" and "PP" in layout:
        with pytest.raises(ConfigError, match="layer_skip guesses with the model's first layers"):
            run(folder, layout, [], **settings)
        return
    few = few_blocks(folder, layout, **settings)
    if method == "draft_model":
        few *= 2  # of which all ranks have the whole
    ran = run(folder, layout, alone("llama"), kv_cache_memory_bytes=few, **settings)
    assert ran.stats.total_preemptions > 0
    assert ran.stats.all_drafts.num_draft_tokens > 50
    if method != "ngram":  # texts don't repeat themselves
        assert ran.stats.all_drafts.num_accepted_tokens > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guesses_of_latent_attention_and_experts(
    layout: str, folder_of: Folder, alone: Alone, tmp_path: Path
) -> None:
    settings = guessing("suffix", tmp_path) | {"kv_cache_memory_bytes": 2 << 20}
    ran = run(folder_of("deepseek_v3"), layout, alone("deepseek_v3"), **settings)
    assert ran.stats.all_drafts.num_accepted_tokens > 0


# --- the other backend --------------------------------------------------------------------------


def test_torch(folder_of: Folder) -> None:
    """Ranks meet through torch.distributed there."""
    settings = SETTINGS | {"backend": "torch", "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    llm = LLM(str(folder_of("llama")), **settings)
    expected = generate(llm)
    llm.shutdown()
    run(folder_of("llama"), "TP=2", expected, **settings)
