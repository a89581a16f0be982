"""The target's first layers as its draft, in the target's own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.speculative.layer_skip import LayerSkip
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.drafting import DraftDrive
from support.forward import load_model
from support.oracle import load_oracle, oracle_logits

RANDOM = np.random.default_rng(4)
PROMPTS = [RANDOM.integers(3, VOCAB_SIZE, size).tolist() for size in (21, 6, 13)]
NUM_LAYERS = 4


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Gemma's embeddings are scaled, its layers see unlike windows and its norms store weight - 1.
    return make_checkpoint(
        "gemma3_text", tmp_path_factory.mktemp("gemma"), num_hidden_layers=NUM_LAYERS
    )


@pytest.fixture(scope="module")
def model(backend: Backend, folder: Path) -> CausalLM:
    return load_model(folder, backend)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


@pytest.fixture(scope="module")
def first_layers(folder: Path) -> dict[int, Any]:
    """The same checkpoint without its later layers."""
    found = {}
    for count in (1, 2, NUM_LAYERS):
        found[count] = load_oracle(folder)
        found[count].model.layers = found[count].model.layers[:count]
        found[count].config.num_hidden_layers = count
    return found


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[-count:]


def make_drive(model: CausalLM, backend: Backend, num_layers: int) -> DraftDrive:
    return DraftDrive(
        model,
        backend,
        lambda sampler: LayerSkip(
            model, backend, sampler, num_layers=num_layers, vocab_size=VOCAB_SIZE
        ),
        vocab_size=VOCAB_SIZE,
    )


@pytest.mark.parametrize("num_layers", [1, 2, NUM_LAYERS])
def test_drafts_are_those_of_the_first_layers_alone(
    model: CausalLM, backend: Backend, oracle: Any, first_layers: dict[int, Any], num_layers: int
) -> None:
    drive = make_drive(model, backend, num_layers)
    for slot, prompt in enumerate(PROMPTS):
        drive.bind(slot, prompt)
    drive.step({}, work={slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    for lengths in ({0: 3, 1: 1, 2: 5}, {2: 2}, {1: 4, 0: 4}):
        expected = {
            slot: greedy(first_layers[num_layers], drive.tokens(slot), length)
            for slot, length in lengths.items()
        }
        drafts = drive.step(lengths, work={slot: 1 for slot in range(3) if slot not in lengths})
        assert {slot: draft.token_ids.tolist() for slot, draft in drafts.items()} == expected
    for slot, prompt in enumerate(PROMPTS):
        generated = drive.tokens(slot)[len(prompt) :]
        assert generated == greedy(oracle, prompt, len(generated))
        if num_layers == NUM_LAYERS:  # all was accepted
            assert len(generated) == 4 + sum({0: (3, 4), 1: (1, 4), 2: (5, 2)}[slot])


def test_it_needs_no_cache(model: CausalLM, backend: Backend) -> None:
    assert not make_drive(model, backend, 1).proposer.kv_heads


@pytest.mark.parametrize("num_layers", [0, -1, NUM_LAYERS + 1])
def test_layers_that_the_model_lacks_are_refused(
    model: CausalLM, backend: Backend, num_layers: int
) -> None:
    with pytest.raises(ConfigError, match=rf"num_layers is {num_layers}, .* 4 layers; use 1 to 4"):
        make_drive(model, backend, num_layers)
