"""Models with every kind of rope scaling against transformers, in both spellings (MDL-02)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.oracle import load_oracle, oracle_logits

TOKENS = np.random.default_rng(2).integers(VOCAB_SIZE, size=100).tolist()

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}


@pytest.fixture(params=SCALINGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    parameters = {"rope_theta": 5000.0, **SCALINGS[request.param]}
    # 64 positions: "dynamic" scales prompts beyond that, here to 100.
    return make_checkpoint(
        "llama", tmp_path, rope_parameters=parameters, max_position_embeddings=64
    )


def logits(source: Path, backend: str = "native", num_positions: int | None = None) -> np.ndarray:
    model = load_model(source, cpu_backend(backend), num_positions=num_positions)
    return Forward(model, cpu_backend(backend)).prompt(TOKENS)


@pytest.mark.filterwarnings("ignore:.*rope.*")
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_spellings(folder: Path, backend: str) -> None:
    expected = oracle_logits(load_oracle(folder), TOKENS)
    new = logits(folder, backend, len(TOKENS))
    np.testing.assert_allclose(new, expected, atol=3e-4, rtol=3e-4)

    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    for key in ("rope_type", "type"):
        config["rope_scaling"] = parameters | {key: parameters["rope_type"]}
        if key == "type":
            del config["rope_scaling"]["rope_type"]
        path.write_text(json.dumps(config))
        assert np.array_equal(logits(folder, backend, len(TOKENS)), new)


@pytest.mark.parametrize("context", [64, 128])
def test_phi3_has_factors_for_short_and_for_long_sequences(tmp_path: Path, context: int) -> None:
    """The prompt of 100 tokens is longer than the original context of 64, or not than 128."""
    size = 16
    factors = np.random.default_rng(4).uniform(1, 3, (2, size // 2)).round(3).tolist()
    make_checkpoint(
        "phi3",
        tmp_path,
        sliding_window=None,
        max_position_embeddings=512,
        original_max_position_embeddings=context,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": factors[0],
            "long_factor": factors[1],
            "rope_theta": 10000.0,
        },
    )
    expected = oracle_logits(load_oracle(tmp_path), TOKENS)
    new = logits(tmp_path, num_positions=len(TOKENS))
    np.testing.assert_allclose(new, expected, atol=3e-4, rtol=3e-4)
    # One set of frequencies for all lengths that are served.
    assert np.array_equal(new, logits(tmp_path, num_positions=512)) == (context == 64)

    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["original_max_position_embeddings"] = context
    config["rope_scaling"] = {k: parameters[k] for k in ("short_factor", "long_factor")}
    config["rope_scaling"]["type"] = "su"  # as the first models of the family said
    path.write_text(json.dumps(config))
    assert np.array_equal(logits(tmp_path, num_positions=len(TOKENS)), new)


def test_gemma_scales_its_global_layers_only(tmp_path: Path) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    make_checkpoint("gemma3_text", tmp_path, rope_parameters=parameters)
    expected = oracle_logits(load_oracle(tmp_path), TOKENS)
    new = logits(tmp_path)
    np.testing.assert_allclose(new, expected, atol=3e-4, rtol=3e-4)

    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    path.write_text(json.dumps(config))
    assert np.array_equal(logits(tmp_path), new)
