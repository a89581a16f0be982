"""What a model's matrices are given, against the same model in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.compression.calibration import Calibration, Replaced
from octavo.core.errors import ConfigError
from octavo.models.registry import build_model
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import make_checkpoint
from support.oracle import load_oracle

SEQUENCES = [np.random.default_rng(2).integers(3, 320, size) for size in (700, 40, 500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        "qwen3", tmp_path_factory.mktemp("calibration"), max_position_embeddings=1024
    )


def calibration_of(checkpoint: Checkpoint, backend: str = "native") -> Calibration:
    return Calibration(build_model(checkpoint.config), checkpoint, cpu_backend(backend), SEQUENCES)


def oracle_hessians(folder: Path) -> dict[str, np.ndarray]:
    """By name of a matrix of a block, from hooks on transformers' modules."""
    import torch

    model = load_oracle(folder)
    sums: dict[str, np.ndarray] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):

            def keep(_: object, inputs: tuple[torch.Tensor], name: str = name) -> None:
                x = inputs[0].flatten(end_dim=-2).numpy().astype(np.float64)
                sums[f"{name}.weight"] = sums.get(f"{name}.weight", 0) + x.T @ x

            module.register_forward_pre_hook(keep)
    with torch.inference_mode():
        for tokens in SEQUENCES:
            model(torch.tensor(tokens[None]), use_cache=False)
    count = sum(map(len, SEQUENCES))
    return {name: total / count for name, total in sums.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_those_of_the_oracle(folder: Path, backend: str) -> None:
    expected = oracle_hessians(folder)
    calibration = calibration_of(open_checkpoint(str(folder)), backend)
    found = {}
    for index in range(2):
        found |= calibration.hessians(index)
        calibration.advance(index, {})
    assert found.keys() == expected.keys()
    for name, hessian in expected.items():
        largest = np.abs(hessian).max()
        np.testing.assert_allclose(found[name], hessian, atol=1e-4 * largest, err_msg=name)


@pytest.mark.parametrize("family", ["opt", "bloom", "phi3", "deepseek_v2"])
def test_so_they_are_in_other_families(family: str, tmp_path: Path) -> None:
    """With positions, a norm of embeddings, fused projections, latent vectors."""
    more = {} if family in ("bloom", "deepseek_v2") else {"max_position_embeddings": 1024}
    folder = make_checkpoint(family, tmp_path, **more)
    expected = oracle_hessians(folder)
    calibration = calibration_of(open_checkpoint(str(folder)))
    for index in range(2):
        found = calibration.hessians(index)
        calibration.advance(index, {})
        assert found
        for name, hessian in found.items():
            largest = np.abs(expected[name]).max()
            np.testing.assert_allclose(hessian, expected[name], atol=1e-4 * largest, err_msg=name)


def test_later_blocks_see_what_quantized_ones_give(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    values = {
        name: np.round(checkpoint.read(name).astype(np.float32), 1)
        for name in checkpoint.tensors
        if name.startswith("model.layers.0.") and checkpoint.tensors[name].shape[-1] > 24
    }
    replaced = calibration_of(checkpoint)
    replaced.hessians(0)
    replaced.advance(0, values)
    model, backend = build_model(checkpoint.config), cpu_backend("native")
    other = Calibration(model, Replaced(checkpoint, values), backend, SEQUENCES)
    other.hessians(0)
    other.advance(0, {})
    plain = calibration_of(checkpoint)
    plain.hessians(0)
    plain.advance(0, {})
    seen, expected, without = (one.hessians(1) for one in (replaced, other, plain))
    for name in expected:
        assert np.array_equal(seen[name], expected[name])
        assert not np.allclose(seen[name], without[name], rtol=1e-3)


def test_without_a_text_nothing_is_calibrated(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=r"no text to calibrate with.*--method rtn"):
        Calibration(build_model(checkpoint.config), checkpoint, cpu_backend("native"), [])
