"""Rounding that lets later weights of a row make up for the errors of earlier ones.

Source: GPTQ, arXiv 2210.17323, with the inputs taken in falling order of their importance; groups
stay where they are in the matrix, and their scales are known before.
"""

from __future__ import annotations

import numpy as np

from octavo.compression.grid import Grid
from octavo.core.errors import ConfigError

_BLOCK = 128
"""Inputs whose errors are carried within the block first, and to all later ones together."""


def compensated_codes(
    weights: np.ndarray, hessian: np.ndarray, grid: Grid, *, damping: float = 0.01
) -> np.ndarray:
    """Codes (O, I) uint8 of weights (O, I), so chosen that `output_error` is small.

    hessian (I, I) float64: the mean of x x^T over inputs x. damping: added to its diagonal, as a
    share of the diagonal's mean. Raises ConfigError if the Hessian is not finite.
    """
    if not np.isfinite(hessian).all():
        raise ConfigError(
            "the model's activations over the calibration text are not finite, so that nothing can "
            "be learned from them; use --method rtn, or another text"
        )
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    factor = _inverse_factor(hessian[np.ix_(order, order)], damping)
    left = np.array(weights[:, order], np.float32)
    scales, zeros = grid.columns(order)  # of the group that an input is in, wherever its turn comes
    zeros = np.broadcast_to(zeros, scales.shape)
    codes = np.empty(left.shape, np.uint8)
    for begin in range(0, left.shape[1], _BLOCK):
        end = min(begin + _BLOCK, left.shape[1])
        errors = np.empty((len(left), end - begin), np.float32)
        for i in range(begin, end):
            column = left[:, i]
            rounded = np.clip(np.rint(column / scales[:, i]) + zeros[:, i], 0, grid.top)
            codes[:, i] = rounded
            kept = scales[:, i] * (rounded - zeros[:, i])
            errors[:, i - begin] = error = (column - kept) / factor[i, i]
            left[:, i + 1 : end] -= np.outer(error, factor[i, i + 1 : end])
        left[:, end:] -= errors @ factor[begin:end, end:]
    in_place = np.empty_like(codes)
    in_place[:, order] = codes
    return in_place


def _inverse_factor(hessian: np.ndarray, damping: float) -> np.ndarray:
    """The upper triangular U with U^T U = (H + damping)^-1, (I, I) float32: row i, divided by its
    diagonal, says what later weights take over of weight i's error.
    """
    diagonal = np.diagonal(hessian)
    damped = hessian + np.diag(np.where(diagonal > 0, damping * diagonal.mean(), 1.0))
    lower = np.linalg.cholesky(np.linalg.inv(damped))
    return np.ascontiguousarray(lower.T, np.float32)


def output_error(weights: np.ndarray, kept: np.ndarray, hessian: np.ndarray) -> float:
    """How far outputs are off, relative to them: the root of E|(W - K) x|^2 / E|W x|^2."""
    difference = (weights - kept).astype(np.float64)
    wide = weights.astype(np.float64)
    off = np.vdot(difference @ hessian, difference)
    whole = np.vdot(wide @ hessian, wide)
    return float(np.sqrt(max(off, 0.0) / whole)) if whole > 0 else 0.0
