"""GPTQ against a plain implementation of what it says."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compression.compensation import compensated_codes, output_error
from octavo.compression.grid import Grid, grid_of
from octavo.core.dtypes import Quantization
from octavo.core.errors import ConfigError


def problem(outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the Hessian of inputs that have much to do with each other."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.1, (outputs, inputs)).astype(np.float32)
    mixing = rng.normal(size=(inputs, inputs // 4))
    x = rng.normal(size=(4 * inputs, inputs // 4)) @ mixing.T
    x += rng.normal(size=x.shape) * rng.lognormal(-1, 1, inputs)
    return weights, x.T @ x / len(x)


def plain_gptq(weights: np.ndarray, hessian: np.ndarray, grid: Grid, damping: float) -> np.ndarray:
    """Weight by weight: round one, let those that are left make up for it in the way that costs
    least (arXiv 2210.17323, eq. 2 and 3), and take it out of the inverse.
    """
    inputs = weights.shape[1]
    order = sorted(range(inputs), key=lambda i: -hessian[i, i])
    diagonal = np.diagonal(hessian)
    inverse = np.linalg.inv(hessian + damping * diagonal.mean() * np.eye(inputs))
    left, codes = weights.astype(np.float64), np.zeros(weights.shape, np.uint8)
    is_left = np.ones(inputs, bool)
    for i in order:
        group = i // grid.group_size  # of where the input is, whenever its turn comes
        scale = grid.scales[:, group].astype(np.float64)
        zero = grid.middle if grid.zeros is None else grid.zeros[:, group].astype(np.float64)
        code = np.clip(np.rint(left[:, i] / scale) + zero, 0, grid.top)
        codes[:, i] = code
        error = (left[:, i] - scale * (code - zero)) / inverse[i, i]
        is_left[i] = False
        left[:, is_left] -= error[:, None] * inverse[i, is_left]
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return codes


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(32, 128, 32), (16, 320, 64)])
def test_qnt_19_codes_and_scales_are_those_of_a_plain_implementation(
    outputs: int, inputs: int, group: int, is_symmetric: bool
) -> None:
    """More inputs than a group has, and than are worked on at a time."""
    weights, hessian = problem(outputs, inputs)
    form = Quantization(4, group, is_symmetric)
    grid = grid_of(weights, form, "float32", np.diagonal(hessian))
    codes = compensated_codes(weights, hessian, grid, damping=0.01)
    assert np.array_equal(codes, plain_gptq(weights, hessian, grid, 0.01))
    again = grid_of(weights, form, "float32", np.diagonal(hessian))
    assert np.array_equal(grid.scales, again.scales)  # known before, and not moved by errors
    nearest = grid_of(weights, form, "float32")
    rounded = output_error(weights, nearest.values(nearest.codes(weights)), hessian)
    assert output_error(weights, grid.values(codes), hessian) < 0.7 * rounded


def test_independent_inputs_have_nothing_to_make_up_for() -> None:
    weights, _ = problem(8, 64)
    hessian = np.diag(np.linspace(0.5, 2.0, 64))
    grid = grid_of(weights, Quantization(4, 32), "float32")
    codes = compensated_codes(weights, hessian, grid)
    assert np.array_equal(codes, grid.codes(weights))


def test_an_input_that_is_never_used_does_no_harm() -> None:
    weights, hessian = problem(8, 64)
    hessian[5] = hessian[:, 5] = 0
    grid = grid_of(weights, Quantization(4, 32), "float32")
    codes = compensated_codes(weights, hessian, grid)
    nearest = grid.codes(weights)
    assert np.array_equal(codes[:, 5], nearest[:, 5])
    assert output_error(weights, grid.values(codes), hessian) < output_error(
        weights, grid.values(nearest), hessian
    )


def test_activations_that_are_not_finite_are_told() -> None:
    weights, hessian = problem(8, 64)
    hessian[3, 4] = np.nan
    grid = grid_of(weights, Quantization(4, 32), "float32")
    with pytest.raises(ConfigError, match=r"not finite.*--method rtn"):
        compensated_codes(weights, hessian, grid)


def test_output_error_is_what_outputs_lose() -> None:
    rng = np.random.default_rng(3)
    weights, x = rng.normal(size=(5, 24)), rng.normal(size=(200, 24)) * rng.uniform(0.1, 3, 24)
    kept = weights + 0.01 * rng.normal(size=weights.shape)
    expected = np.linalg.norm(x @ (weights - kept).T) / np.linalg.norm(x @ weights.T)
    assert output_error(weights, kept, x.T @ x / 200) == pytest.approx(expected)
    assert output_error(np.zeros((5, 24)), np.zeros((5, 24)), x.T @ x) == 0
