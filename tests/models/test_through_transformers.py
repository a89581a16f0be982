"""Models that run as transformers' modules: what is refused and why, how weights come in, and the
engine around them. Their logits are compared in test_families.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.models.registry import engine_model
from octavo.models.through_transformers import attention
from octavo.models.through_transformers.attention import Unsupported, window_of
from octavo.weights.safetensors_file import SafetensorsFile
from octavo.weights.safetensors_writer import write_safetensors
from support.backends import cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.oracle import load_oracle, oracle_logits
from support.quantized_files import CASES, quantize_checkpoint

FAMILIES = ("ernie4_5_moe", "exaone4")  # a mixture of experts; windows
COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ARCEE = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", **COMMON}
rng = np.random.default_rng(3)
SHARED = rng.integers(3, VOCAB_SIZE, 40).tolist()
PROMPTS = [
    (SHARED if i % 3 == 0 else []) + rng.integers(3, VOCAB_SIZE, length).tolist()
    for i, length in enumerate([1, 15, 16, 17, 33, 50, 64, 70])
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONGEST = max(map(len, PROMPTS)) + GREEDY.max_tokens


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "linear_attention"),
        ({"architectures": None, "model_type": "rwkv"}, "model_type 'rwkv'.*recurrent layers"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "no causal lang"),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart"}, "has an encoder"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "sees others than those"),
        ({"architectures": ["BioGptForCausalLM"], "model_type": "biogpt"}, "can't be replaced"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
            "several models .text_config, vision_config",
        ),
        ({"architectures": ["DogeForCausalLM"], "model_type": "doge"}, "forward without weights"),
        (
            {"architectures": ["NewForCausalLM"], "auto_map": {"AutoModelForCausalLM": "new.New"}},
            "no causal language model of this name; code that comes with a checkpoint is never",
        ),
        (
            ARCEE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' turns all positions",
        ),
        (ARCEE | {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to"),
        (ARCEE | {"hidden_size": "64"}, "doesn't take its config.json: .*hidden_size"),
        (ARCEE | {"hidden_act": "none"}, "forward without weights fails: KeyError: 'none'"),
    ],
)
def test_what_cannot_run_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        engine_model({**COMMON, **config})
    named = (config["architectures"] or ["rwkv"])[0]
    assert named in str(refusal.value) or "num_hidden_layers" in str(refusal.value)
    assert "octavo models" in str(refusal.value) or "num_hidden_layers" in str(refusal.value)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named(package: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from octavo.core.errors import ConfigError
from octavo.models.registry import engine_model
try:
    engine_model({{"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}})
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert f"needs {package}: pip install 'octavo[transformers]'" in done.stdout


def test_a_config_does_not_choose_what_computes() -> None:
    """Some of these would have transformers fetch code."""
    chosen = {"attn_implementation": "someone/kernels", "_attn_implementation": "someone/kernels"}
    model = engine_model(ARCEE | chosen | {"quantization_config": {"quant_method": "gptq"}})
    assert model.kv_shapes == [(2, 16)] * 2
    assert (model.max_position, model.vocab_size) == (512, 320)


def masks(visible: Callable[[Any, Any], Any]) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: visible(query, key)


def test_windows_are_those_of_masks() -> None:
    assert window_of(masks(lambda q, k: k <= q), 100) is None
    assert window_of(masks(lambda q, k: (k <= q) & (k > q - 24)), 100) == 24
    assert window_of(masks(lambda q, k: (k <= q) & (k > q - 1)), 100) == 1
    assert window_of(masks(lambda q, k: (k <= q) & (k > q - 100)), 100) is None
    assert window_of(masks(lambda q, k: k <= q), 1) is None
    for wrong in (
        lambda q, k: k <= k,
        lambda q, k: k < q,
        lambda q, k: (k <= q) & (k // 32 == q // 32),
        lambda q, k: (k <= q) & (k // 50 == q // 50),
        lambda q, k: (k <= q) & (k % 2 == 0),
    ):
        with pytest.raises(Unsupported):
            window_of(masks(wrong), 100)


def test_attention_that_goes_wrong_is_noticed_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.paged_attention

    def wrong(*args: Any, softmax_scale: float, **kwargs: Any) -> Any:
        return right(*args, softmax_scale=1.1 * softmax_scale, **kwargs)

    monkeypatch.setattr(attention, "paged_attention", wrong)
    with pytest.raises(ConfigError, match=r"ArceeForCausalLM of transformers.*gives other logits"):
        load_model(make_checkpoint("arcee", tmp_path), cpu_backend("torch"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "missing: .*layers.1.mlp.up_proj.weight"),
        ("unexpected", "unexpected: .*extra"),
        ("wrong shape", r"wrong shape: model.norm.weight is \[3\] instead of \[64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, fault: str, message: str) -> None:
    file = make_checkpoint("arcee", tmp_path) / "model.safetensors"
    stored = SafetensorsFile(file)
    weights = {name: np.array(stored.read(name)) for name in stored.tensors}
    if fault == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif fault == "unexpected":
        weights["model.layers.0.extra"] = np.ones(3, np.float32)
    else:
        weights["model.norm.weight"] = np.ones(3, np.float32)
    write_safetensors(file, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, cpu_backend("torch"))


@pytest.mark.parametrize("family", ["arcee", "ernie4_5_moe"])
def test_quantized_matrices_become_floats(tmp_path: Path, family: str) -> None:
    source = make_checkpoint(family, tmp_path / "source")
    case = next(name for name in CASES if name.startswith("gptq"))
    quantized, floats = quantize_checkpoint(CASES[case], source, tmp_path)
    tokens, backend = PROMPTS[4], cpu_backend("torch")
    found, expected = (
        Forward(load_model(folder, backend), backend).prompt(tokens)
        for folder in (quantized, floats)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """transformers' likeliest tokens."""
    oracle = load_oracle(folder)
    texts = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(GREEDY.max_tokens):
            tokens.append(int(oracle_logits(oracle, tokens)[-1].argmax()))
        texts.append(tokens[len(prompt) :])
    return texts


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"max_num_batched_tokens": 5, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 33, "block_size": 4, "max_num_seqs": 3},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "adaptive": False,
                "prompt_lookup_min": 1,
            }
        },
    ],
    ids=["together", "chunks of 5", "three at a time", "n-grams guess"],
)
def test_the_engine_writes_what_transformers_writes(
    folder: Path, expected: list[list[int]], knobs: dict[str, Any]
) -> None:
    llm = LLM(str(folder), device="cpu", **knobs)
    for _ in range(2):  # the second time with hits, and with a history to guess from
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    if knobs.get("enable_prefix_caching", True):
        assert sum(output.num_cached_tokens for output in outputs) > 200
    if "speculative_config" in knobs:
        assert llm.get_metrics().all_drafts.num_draft_tokens > 100
    llm.shutdown()


def test_preemption_changes_nothing(folder: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(folder), device="cpu", max_num_seqs=1)
    block_bytes = llm.facts.block_bytes
    llm.shutdown()
    llm = LLM(
        str(folder),
        device="cpu",
        max_model_len=LONGEST,
        max_num_batched_tokens=20,
        kv_cache_memory_bytes=10 * block_bytes,
    )
    outputs = llm.generate(PROMPTS, replace(GREEDY, n=2))
    for index in (0, 1):
        assert [output.outputs[index].token_ids for output in outputs] == expected
    assert llm.get_metrics().total_preemptions > 0
    llm.shutdown()


def test_the_start_says_what_computes(tmp_path: Path) -> None:
    llm = LLM(str(make_checkpoint("arcee", tmp_path)), device="cpu")
    llm.shutdown()
    told = llm.facts.decisions[0]
    assert told.what == "model"
    assert told.value.startswith("ArceeForCausalLM of transformers 5")
    assert "Octavo has no family for it" in told.reason


def test_perplexity_is_measured_as_of_any_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint("arcee", tmp_path / "model")
    (tmp_path / "text").write_text("The reader turns the pages one after the other. " * 40)
    few = ["--context", "32", "--windows", "3", "--threads", "1"]
    text = ["--text", str(tmp_path / "text"), *few]
    assert main(["eval", "perplexity", str(folder), *text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["context"], found["positions"]) == (32, 3 * 15)
    assert found["perplexity"] > 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"backend": "native"}, "--backend native: arcee runs on the torch backend alone"),
        ({"quantization": "int8"}, "--quantization int8: arcee runs as transformers' module"),
        (
            {"speculative_config": {"method": "layer_skip"}},
            "layer_skip uses the model's own layers.*use ngram, suffix or draft_model",
        ),
    ],
)
def test_what_needs_octavos_layers_is_refused(
    tmp_path: Path, knobs: dict[str, Any], message: str
) -> None:
    folder = make_checkpoint("arcee", tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **knobs)
