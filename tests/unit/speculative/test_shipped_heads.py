from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.speculative.heads import head_name
from octavo.speculative.registry import Options


def target(name: str) -> Any:
    return SimpleNamespace(checkpoint=SimpleNamespace(name=name))


def test_the_default_model_has_a_small_head() -> None:
    folder = Path(head_name(Options("eagle", {}), target("SmolLM2-135M-Instruct")))
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6


def test_a_head_that_is_named_comes_first() -> None:
    options = Options("eagle", {"model": "org/head"})
    assert head_name(options, target("SmolLM2-135M-Instruct")) == "org/head"


def test_without_one_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="of method medusa comes with Octavo for m; name one"):
        head_name(Options("medusa", {}), target("m"))
