"""Grids of quantized matrices."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compression.grid import DTYPES, Grid, grid_of
from octavo.core.dtypes import INTEGER_QUANTIZATIONS, Quantization

FORMS = [*INTEGER_QUANTIZATIONS.values()]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.3, shape).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_weight_is_rounded_to_the_nearest(form: Quantization, dtype: str) -> None:
    weights = normal(7, 256)
    grid = grid_of(weights, form, dtype)
    codes = grid.codes(weights)
    size = form.group_size or 256
    assert grid.scales.shape == (7, 256 // size)
    assert np.array_equal(grid.scales, grid.scales.astype(DTYPES[dtype]).astype(np.float32))
    assert (grid.zeros is None) == form.is_symmetric
    for row in range(7):
        for group in range(256 // size):
            of_group = slice(group * size, (group + 1) * size)
            zero = grid.middle if grid.zeros is None else int(grid.zeros[row, group])
            points = grid.scales[row, group] * (np.arange(2**form.bits) - np.float32(zero))
            nearest = np.abs(weights[row, of_group, None] - points).min(-1)
            off = np.abs(grid.values(codes)[row, of_group] - weights[row, of_group])
            np.testing.assert_allclose(off, nearest, atol=1e-7)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_group_is_covered(form: Quantization) -> None:
    """Nothing is further from its value than half a step, but for a symmetric grid's top, which the
    middle leaves out.
    """
    weights = normal(5, 128)
    grid = grid_of(weights, form, "float32")
    step = np.repeat(grid.scales, grid.group_size, axis=1)
    off = np.abs(grid.values(grid.codes(weights)) - weights) / step
    assert off.max() <= (0.5 if form.is_symmetric else 1.0) + 1e-3
    assert np.median(off) < 0.3


def test_zero_is_kept() -> None:
    weights = np.abs(normal(4, 64)) + 1
    weights[:, ::7] = 0
    grid = grid_of(weights, Quantization(4, 32, is_symmetric=False), "bfloat16")
    assert (grid.values(grid.codes(weights))[:, ::7] == 0).all()


def test_a_group_of_zeros_has_a_scale() -> None:
    weights = normal(2, 64)
    weights[0, :32] = 0
    for form in (Quantization(4, 32), Quantization(4, 32, is_symmetric=False)):
        grid = grid_of(weights, form, "float16")
        assert (grid.scales > 0).all()
        assert (grid.values(grid.codes(weights))[0, :32] == 0).all()


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_a_search_never_loses_what_counts(is_symmetric: bool) -> None:
    weights, form = normal(300, 128), Quantization(4, 64, is_symmetric)
    importance = np.random.default_rng(2).lognormal(0, 2, 128)
    plain, found = (grid_of(weights, form, "float32", given) for given in (None, importance))

    def error(grid: Grid) -> np.ndarray:
        off = (grid.values(grid.codes(weights)) - weights) ** 2 * importance
        return off.reshape(300, 2, 64).sum(-1)

    assert (error(found) <= error(plain) * (1 + 1e-5)).all()
    assert error(found).sum() < 0.8 * error(plain).sum()
