"""What a config.json leaves out is what transformers takes it for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.models.registry import build_model
from support.checkpoints import EXPERT_FAMILIES, FAMILIES, make_checkpoint

WITHOUT = ("olmo", "opt")
"""Families whose norms have no key for it."""


@pytest.mark.parametrize("family", [f for f in (*FAMILIES, *EXPERT_FAMILIES) if f not in WITHOUT])
def test_what_norms_add_to_the_variance(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    config = json.loads((make_checkpoint(family, tmp_path) / "config.json").read_text())
    (key,) = [key for key in config if key.endswith(("eps", "epsilon"))]
    del config[key]
    assert build_model(config).norm.eps == getattr(CONFIG_MAPPING[family](), key)
