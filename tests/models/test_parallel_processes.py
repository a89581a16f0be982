"""Every family on several worker processes writes what one process writes: real ones, with their
groups, links and messages, in float32.

Stages compute what the whole model computes, bit by bit. Tensor ranks add up in another order: what
they find likely is compared within a tolerance, and the tokens are the same, since no two that
could follow are so near. Engines of --data-parallel-size are whole processes of one engine each and
know nothing of families: three of these stand for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError
from octavo.llm import CompletionOutput
from octavo.models.registry import build_model, families
from octavo.weights.safetensors_writer import write_safetensors
from support.checkpoints import FOREIGN_FAMILIES, VOCAB_SIZE, make_checkpoint
from support.family_variants import VARIANTS as PUBLISHED
from support.forked_workers import workers_are_forked

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: one for name, one in PUBLISHED.items() if name not in FOREIGN_FAMILIES},
    "internlm2": ("internlm2", {}),
    "llama, 3 heads on 2 ranks": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    ),
}
FAMILIES = [name for name in VARIANTS if name == VARIANTS[name][0]]
LAYOUTS: dict[str, dict[str, int]] = {
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "TP=2 x PP=2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
CASES = [
    *((name, layout) for name in FAMILIES for layout in LAYOUTS),
    *((name, "TP=2 x PP=2") for name in VARIANTS if name not in FAMILIES),
    ("llama tied", "PP=2"),  # MDL-07
]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "worker_timeout": 60.0,  # tests may share their CPUs with others
    "max_model_len": 128,
    "max_num_batched_tokens": 32,  # the longest prompt takes two steps
    "kv_cache_memory_bytes": 2 << 20,
}
PROMPTS = [
    np.random.default_rng(size).integers(3, VOCAB_SIZE, size).tolist() for size in (1, 17, 40)
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
TOLERANCE = 1e-4
"""Of log-probabilities, where logits are about 10. The most seen is 1.8e-5; the two likeliest
tokens are never nearer to each other than 1.1e-4.
"""
Make = Callable[[str], tuple[Path, list[CompletionOutput]]]


@pytest.fixture(scope="module", autouse=True)
def _quick_starts() -> Iterator[None]:
    with workers_are_forked():
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A variant's checkpoint, and what one process makes of the prompts."""

    @cache
    def make(variant: str) -> tuple[Path, list[CompletionOutput]]:
        family, overrides = VARIANTS[variant]
        folder: Path = tmp_path_factory.mktemp("checkpoint")
        if family == "internlm2":
            internlm2(folder)
        else:
            make_checkpoint(family, folder, **overrides)
        return folder, generate(folder)

    return make


def internlm2(folder: Path) -> None:
    """transformers has no module that would write it."""
    config = json.loads((make_checkpoint("llama", folder) / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {
        name: (0.3 * rng.normal(size=shape) + (len(shape) == 1)).astype(np.float32)
        for weight in build_model(config).weights()
        for name, shape in weight.parts()
    }
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def generate(folder: Path, **layout: int) -> list[CompletionOutput]:
    llm = LLM(str(folder), **SETTINGS, **layout)
    try:
        return [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    finally:
        llm.shutdown()


def test_every_family_is_here() -> None:
    assert {family.model_type for family in families()} == set(FAMILIES)


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_processes_write_what_one_writes(alone: Make, variant: str, layout: str) -> None:
    folder, expected = alone(variant)
    found = generate(folder, **LAYOUTS[layout])
    if "TP" in layout:
        check_near(found, expected)
    else:
        assert found == expected


def check_near(found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for got, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(likely(got), likely(one), atol=TOLERANCE)


def likely(output: CompletionOutput) -> list[list[float]]:
    """Of each place, the log-probabilities of the tokens that are likeliest there."""
    assert output.logprobs is not None
    return [[one.logprob for one in place.values()] for place in output.logprobs]


@pytest.mark.parametrize(("num_heads", "size"), [(2, 4), (1, 2)])
def test_mdl_05_key_heads_are_replicated(tmp_path: Path, num_heads: int, size: int) -> None:
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=num_heads)
    check_near(generate(folder, tensor_parallel_size=size), generate(folder))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3_text"])
def test_two_engines_write_what_one_writes(alone: Make, family: str) -> None:
    folder, expected = alone(family)
    assert generate(folder, data_parallel_size=2) == expected


# --- refusals, before weights are read ----------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "overrides", "words"),
    [
        ({"tensor_parallel_size": 3}, {"num_key_value_heads": 4}, "4 attention .* 3 ranks"),
        ({"pipeline_parallel_size": 3}, {}, "size 3: the model has 2 layers.* use at most 2"),
    ],
)
def test_mdl_07_and_08_layouts_that_do_not_fit_are_refused(
    tmp_path: Path,
    layout: dict[str, int],
    overrides: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*arguments: object) -> None:
        pytest.fail("weights are read")

    monkeypatch.setattr("octavo.executor.multiproc.MultiprocExecutor.load", load)
    folder = make_checkpoint("llama", tmp_path, **overrides)
    with pytest.raises(ConfigError, match=words):
        generate(folder, **layout)


@pytest.mark.parametrize("layout", ["TP=2", "PP=2"])
@pytest.mark.parametrize("family", FOREIGN_FAMILIES[:2])
def test_modules_of_transformers_are_refused(tmp_path: Path, family: str, layout: str) -> None:
    folder = make_checkpoint(family, tmp_path)
    with pytest.raises(ConfigError, match=f"{family} .* --data-parallel-size"):
        generate(folder, **LAYOUTS[layout])
