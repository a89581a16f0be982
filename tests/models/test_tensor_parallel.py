"""Models divided over ranks give the logits of one process: every family, with tiny random weights.

Ranks are threads; what they exchange is what processes would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import cpu_backend
from support.checkpoints import FOREIGN_FAMILIES, VOCAB_SIZE, make_checkpoint
from support.family_variants import VARIANTS
from support.forward import Forward, load_model
from support.tensor_ranks import Ranks

TOKENS = np.random.default_rng(3).integers(VOCAB_SIZE, size=40).tolist()
TOLERANCE = 1e-4
"""Of logits of about 10. Ranks add up parts of what one process adds up in one go: float32 with
another order of summation, which two or more layers and weights of 0.3 carry on.
"""
OWN = [variant for variant in VARIANTS if variant not in FOREIGN_FAMILIES]


def check(folder: Path, backend: str, size: int, **weights: Any) -> Ranks:
    """The ranks' logits are those of one process, in one go and by chunks."""
    whole = Forward(load_model(folder, cpu_backend(backend), **weights), cpu_backend(backend))
    expected = whole.prompt(TOKENS)
    ranks = Ranks(folder, backend, size, **weights)
    for chunk in (None, 7):
        actual = ranks.prompt(TOKENS, chunk=chunk)
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    return ranks


@pytest.mark.parametrize("backend", ["torch"])
@pytest.mark.parametrize("variant", OWN)
def test_two_ranks_are_one_model(tmp_path: Path, variant: str, backend: str) -> None:
    family, overrides = VARIANTS[variant]
    check(make_checkpoint(family, tmp_path, **overrides), backend, 2)
