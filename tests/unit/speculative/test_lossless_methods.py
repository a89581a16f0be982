"""Each method, as registered, leaves the distribution of a real model's tokens as it is: chi-square
tests of 208,896 tokens each, at several temperatures and with filters, against probabilities from
plain forwards. Drafts are far from the target: random heads, another model, too few layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.sampling import sampler as sampler_module
from octavo.sampling.rejection import draw
from octavo.sampling.sampler import Sampler
from octavo.speculative.proposer import Proposer
from octavo.speculative.registry import Target, build_proposers, methods
from octavo.weights import open_checkpoint
from support.backends import cpu_backend
from support.checkpoints import make_checkpoint
from support.draft_heads import CONFIG, eagle3_tensors, eagle_tensors, medusa_tensors, save_head
from support.forward import load_model
from support.prompt_trials import PromptTrials

V = 8
PROMPT = (3, 5, 1, 6, 3, 5, 2, 3, 5)
"""Ends as it began, so that there is something to look up."""
NUM_SEQUENCES = 68 * 1024
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5, top_p=0.95),
    SamplingParams(temperature=1.5, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=6, top_p=0.9, logit_bias={2: 1.5}),
]


def draft_model(folder: Path) -> dict[str, Any]:
    make_checkpoint("llama", folder, seed=9, num_hidden_layers=1)
    return {"model": str(folder)}


def medusa(folder: Path) -> dict[str, Any]:
    config = CONFIG | {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return {"model": str(save_head(folder, medusa_tensors(), config))}


def eagle(folder: Path) -> dict[str, Any]:
    return {"model": str(save_head(folder, eagle_tensors(), CONFIG))}


def eagle3(folder: Path) -> dict[str, Any]:
    """It guesses among six of the tokens only."""
    tensors = eagle3_tensors(num_draft_tokens=6) | {"d2t": np.zeros(6, np.int64)}
    tensors["t2d"] = np.arange(len(tensors["t2d"])) < 6
    config = {"draft_vocab_size": 6, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    return {"model": str(save_head(folder, tensors, CONFIG | config))}


SETTINGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "draft_model": draft_model,
    "eagle": eagle,
    "eagle3": eagle3,
    "layer_skip": lambda folder: {"num_layers": 1},
    "medusa": medusa,
    "ngram": lambda folder: {},
    "suffix": lambda folder: {},
}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return cpu_backend("native")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def model(backend: Backend, target_folder: Path) -> CausalLM:
    return load_model(target_folder, backend)


def trials_of(
    method: str, folder: Path, backend: Backend, model: CausalLM, target_folder: Path
) -> PromptTrials:
    settings = {"method": method, **SETTINGS[method](folder)}

    def build(sampler: Sampler) -> Proposer:
        target = Target(
            model=model,
            checkpoint=open_checkpoint(str(target_folder)),
            backend=backend,
            sampler=sampler,
            dtype="float32",
            quantization=None,
            vocab_size=V,
            open_model=open_checkpoint,
        )
        (proposer,) = build_proposers([settings], target)
        return proposer

    return PromptTrials(backend, model, build, prompt=PROMPT, vocab_size=V)


@pytest.mark.parametrize("method", methods())
def test_tokens_are_distributed_as_without_speculation(
    method: str, tmp_path: Path, backend: Backend, model: CausalLM, target_folder: Path
) -> None:
    trials = trials_of(method, tmp_path, backend, model, target_folder)
    generated = trials.generate(PARAMS, NUM_SEQUENCES)
    assert trials.num_drafts > NUM_SEQUENCES / 2
    trials.check(generated, PARAMS)


def test_a_wrong_verifier_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: Backend,
    model: CausalLM,
    target_folder: Path,
) -> None:
    def resample_from_p(
        p: np.ndarray, q: np.ndarray, drafts: np.ndarray, acceptance: np.ndarray, again: np.ndarray
    ) -> np.ndarray:
        rows = np.arange(len(drafts))
        is_accepted = acceptance * q[rows, drafts] < p[rows, drafts]
        return np.where(is_accepted, drafts, draw(p, again))

    monkeypatch.setattr(sampler_module, "accept_or_resample", resample_from_p)
    trials = trials_of("draft_model", tmp_path, backend, model, target_folder)
    generated = trials.generate(PARAMS, NUM_SEQUENCES // 10)
    with pytest.raises(AssertionError, match="chi-square"):
        trials.check(generated, PARAMS)
