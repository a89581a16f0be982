"""What a model's matrices are given, against the same model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    given: dict[str, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):

            def keep(_: object, inputs: tuple[torch.Tensor], name: str = name) -> None:
                x = inputs[0].flatten(end_dim=-2).numpy().astype(np.float64)
                sums[f"{name}.weight"] = sums.get(f"{name}.weight", 0) + x.T @ x

            module.register_forward_pre_hook(keep)
        if hasattr(module, "gate_up_proj") and name.endswith("experts"):

            def route(experts: Any, inputs: tuple[torch.Tensor, ...], name: str = name) -> None:
                x, chosen = inputs[0].flatten(end_dim=-2), inputs[1]
                given.setdefault(name, (experts, []))[1].append((x.clone(), chosen.clone()))

            module.register_forward_pre_hook(route)
    with torch.inference_mode():
        for tokens in SEQUENCES:
            model(torch.tensor(tokens[None]), use_cache=False)
    count = sum(map(len, SEQUENCES))
    found = {name: total / count for name, total in sums.items()}
    for name, (experts, parts) in given.items():
        x, chosen = (torch.cat(list(column)) for column in zip(*parts, strict=True))
        for number, weights in enumerate(experts.gate_up_proj):
            rows = x[(chosen == number).any(dim=1)]
            gate, up = (rows @ weights.detach().T).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            for part, seen in (("gate", rows), ("up", rows), ("down", inner)):
                wide = seen.numpy().astype(np.float64)
                found[f"{name}.{number}.{part}_proj.weight"] = wide.T @ wide / len(wide)
    return found


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


@pytest.mark.parametrize(
    "family", ["opt", "bloom", "phi3", "deepseek_v2", "deepseek_v3", "qwen3_moe"]
)
def test_so_they_are_in_other_families(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With positions, a norm of embeddings, fused projections, latent vectors, experts."""
    monkeypatch.setattr("octavo.compression.hessians._FEWEST_ROWS", 1)
    is_long = family == "bloom" or family.startswith("deepseek")
    more = {} if is_long else {"max_position_embeddings": 1024}
    folder = make_checkpoint(family, tmp_path, **more)
    expected = oracle_hessians(folder)
    calibration = calibration_of(open_checkpoint(str(folder)))
    for index in range(2):
        found = calibration.hessians(index)
        calibration.advance(index, {})
        of_block = {name for name in expected if f".{index}." in name.partition("experts")[0]}
        # kv_b_proj is taken apart: queries and outputs of heads are multiplied by its halves.
        assert of_block == set(found) | {name for name in of_block if "kv_b_proj" in name}
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


def test_experts_that_few_tokens_go_to_see_others_too(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint("qwen3_moe", tmp_path)))
    model = build_model(checkpoint.config)
    tokens = np.random.default_rng(4).integers(3, 320, 60)
    found = Calibration(model, checkpoint, cpu_backend("native"), [tokens]).hessians(0)
    of_up = [matrix for name, matrix in found.items() if name.endswith("up_proj.weight")]
    assert len(of_up) > 2
    for matrix in of_up:  # fewer tokens than there should be: each sees them all
        np.testing.assert_array_equal(matrix, of_up[0])
    assert np.linalg.matrix_rank(of_up[0]) > 50


def test_without_a_text_nothing_is_calibrated(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=r"no text to calibrate with.*--method rtn"):
        Calibration(build_model(checkpoint.config), checkpoint, cpu_backend("native"), [])
