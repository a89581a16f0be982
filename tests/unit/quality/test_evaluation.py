"""Perplexity and divergence of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.quality.bare_model import BareModel
from octavo.quality.distance import log_softmax
from octavo.quality.evaluation import Windows, distance, perplexity
from octavo.weights import open_checkpoint
from octavo.weights.safetensors_writer import write_safetensors
from support.backends import BACKENDS
from support.checkpoints import make_checkpoint
from support.oracle import load_oracle, oracle_logits

CONTEXT, COUNT = 64, 3
TOKENS = np.random.default_rng(0).integers(3, 320, CONTEXT * COUNT + 5).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("quality"))


def model_of(folder: Path, **knobs: Any) -> BareModel:
    config = Config.from_flat({"model": str(folder), "threads": 1, **knobs})
    return BareModel(open_checkpoint(str(folder)), config, CONTEXT)


def nothing_shown(done: int, total: int) -> None:
    assert done <= total


@pytest.mark.parametrize("backend", BACKENDS)
def test_perplexity_is_that_of_the_oracle(folder: Path, backend: str) -> None:
    windows = Windows.of(TOKENS, CONTEXT, COUNT)
    assert windows.num_positions == COUNT * (CONTEXT // 2 - 1)
    oracle = load_oracle(folder)
    surprise = [
        -log_softmax(oracle_logits(oracle, window))[position, window[position + 1]]
        for window in windows.tokens.tolist()
        for position in range(CONTEXT // 2, CONTEXT - 1)
    ]
    found = perplexity(model_of(folder, backend=backend), windows, nothing_shown)
    assert found.value == pytest.approx(np.exp(np.mean(surprise)), rel=1e-4)
    expected = 100 * np.std(surprise, ddof=1) / np.sqrt(len(surprise))
    assert found.error == pytest.approx(expected, rel=1e-3)


def test_a_model_is_not_apart_from_itself(folder: Path) -> None:
    windows = Windows.of(TOKENS, CONTEXT, COUNT)
    apart = distance(model_of(folder), model_of(folder), windows, nothing_shown)
    assert len(apart.divergence) == windows.num_positions
    assert np.abs(apart.divergence).max() < 1e-9
    assert apart.agrees.all()


def test_fewer_bits_are_further_away(folder: Path) -> None:
    windows = Windows.of(TOKENS, CONTEXT, COUNT)
    reference = model_of(folder)
    means = [
        distance(reference, model_of(folder, **knobs), windows, nothing_shown).divergence.mean()
        for knobs in (
            {"dtype": "bfloat16"},
            {"quantization": "int8"},
            {"quantization": "int4", "kv_cache_dtype": "int4"},
        )
    ]
    assert 0 < means[0] < means[1] < means[2]


def test_other_vocabularies_are_refused(folder: Path, tmp_path: Path) -> None:
    other = model_of(make_checkpoint("qwen3", tmp_path, vocab_size=384))
    with pytest.raises(ConfigError, match="a vocabulary of 320 tokens, the model one of 384"):
        distance(model_of(folder), other, Windows.of(TOKENS, CONTEXT, COUNT), nothing_shown)


def test_a_text_that_is_too_short_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="the text has 197 tokens, and 4 windows of 64 need 256"):
        Windows.of(TOKENS, CONTEXT, 4)


def test_windows_begin_with_what_every_text_begins_with() -> None:
    windows = Windows.of(TOKENS, CONTEXT, COUNT, bos_id=1)
    assert windows.tokens[:, 0].tolist() == [1] * COUNT
    assert windows.tokens[:, 1:].tolist() == [
        TOKENS[CONTEXT * i + 1 : CONTEXT * (i + 1)] for i in range(COUNT)
    ]


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (np.nan, "logits are no finite numbers; use --dtype float32"),
        (1e4, r"by [\d,]+ nats a token, and one that has learned nothing by about 10"),
    ],
)
def test_damaged_weights_are_told(tmp_path: Path, factor: float, message: str) -> None:
    folder = make_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= np.float32(factor)
    write_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    model, windows = model_of(folder), Windows.of(TOKENS, CONTEXT, COUNT)
    with pytest.raises(ConfigError, match=message):
        perplexity(model, windows, nothing_shown)
    with pytest.raises(ConfigError, match=message):
        _ = distance(model, model, windows, nothing_shown).perplexity_change
