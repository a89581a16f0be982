"""What `sample` draws is distributed as `probabilities` says."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import ops
from support.backends import KERNELS, backend_of

SETTINGS = {  # temperature, top_k, top_p, min_p
    "plain": (1.0, 0, 1.0, 0.0),
    "greedy": (0.0, 0, 1.0, 0.0),
    "hot": (2.0, 0, 1.0, 0.0),
    "top_k": (0.8, 7, 1.0, 0.0),
    "top_p": (1.0, 0, 0.6, 0.0),
    "min_p": (1.0, 0, 1.0, 0.05),
    "top_k and top_p": (1.3, 30, 0.7, 0.0),
    "top_p and min_p": (1.3, 0, 0.9, 0.01),
    "all": (0.7, 20, 0.9, 0.02),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab", [40, 3000])
def test_evenly_spread_numbers_draw_each_token_in_proportion(
    kernels: str, setting: str, vocab: int
) -> None:
    """Of N numbers a token that is drawn for a range of length p gets N p, but for one."""
    backend, count = backend_of(kernels), 2000
    logits = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    temperature, top_k, top_p, min_p = SETTINGS[setting]

    def settings(rows: int) -> tuple[np.ndarray, ...]:
        floats = (np.full(rows, value, np.float32) for value in (temperature, top_p, min_p))
        heat, mass, floor = floats
        return heat, np.full(rows, top_k), mass, floor

    (p,) = ops.probabilities(backend.from_host(logits[None]), *settings(1))
    uniform = (np.arange(count) + 0.5) / count
    rows = backend.from_host(np.tile(logits, (count, 1)))
    tokens = ops.sample(rows, *settings(count), uniform)
    assert p.sum() == pytest.approx(1.0, abs=1e-5)
    drawn = np.bincount(tokens, minlength=vocab)
    assert not drawn[p == 0].any()
    assert np.abs(drawn - count * p).max() < 1.01
