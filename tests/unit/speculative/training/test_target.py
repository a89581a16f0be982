from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from octavo.config import Config
from octavo.speculative.training.target import Target
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import cpu_backend
from support.checkpoints import make_checkpoint
from support.forward import Forward, load_model

SEQUENCES = [list(range(5, 5 + length)) for length in (40, 3, 17, 64)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint("gemma3_text", tmp_path_factory.mktemp("target"))))


def target_of(checkpoint: Checkpoint) -> Target:
    return Target(checkpoint, Config.from_flat({"model": str(checkpoint.path)}))


def test_features_make_the_logits_of_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target, path = target_of(checkpoint), tmp_path / "features.bf16"
    shown: list[int] = []
    target.write_features(path, SEQUENCES, shown.append)
    features = np.fromfile(path, ml_dtypes.bfloat16).reshape(-1, target.spec.hidden_size)
    assert shown[-1] == len(features) == sum(map(len, SEQUENCES))
    backend = cpu_backend("native")
    forward = Forward(load_model(checkpoint, backend), backend)
    logits = np.concatenate([forward.prompt(tokens) for tokens in SEQUENCES])
    made = features.astype(np.float32) @ target.head().T
    # bfloat16 keeps eight bits of a feature.
    assert np.abs(made - logits).max() < 0.02 * np.abs(logits).max()


def test_embeddings_have_the_familys_factor(checkpoint: Checkpoint) -> None:
    target = target_of(checkpoint)
    table = checkpoint.read("model.embed_tokens.weight")
    scaled = table * np.float32(target.spec.hidden_size**0.5)
    np.testing.assert_allclose(target.embeddings(), scaled, rtol=1e-6)


def test_features_are_gone_on_with(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    target_of(checkpoint).write_features(whole, SEQUENCES, lambda done: None)
    data = whole.read_bytes()
    cut.write_bytes(data[: len(data) // 2])  # within a sequence
    target_of(checkpoint).write_features(cut, SEQUENCES, lambda done: None)
    assert cut.read_bytes() == data
    shown: list[int] = []
    target_of(checkpoint).write_features(cut, SEQUENCES, shown.append)
    assert shown == [sum(map(len, SEQUENCES))]
