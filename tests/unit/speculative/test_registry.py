from __future__ import annotations

import pytest

from octavo.core.errors import ConfigError
from octavo.speculative.registry import Options, methods


def test_every_method_is_found() -> None:
    assert {"ngram", "suffix", "draft_model", "layer_skip", "medusa", "eagle", "eagle3"} <= set(
        methods()
    )


def test_values_are_checked() -> None:
    options = Options("ngram", {"low": 0, "kind": 3, "flag": True})
    assert options.integer("other", 7, low=1) == 7
    with pytest.raises(ConfigError, match="low must be an integer from 1 to 5, got 0"):
        options.integer("low", 2, low=1, high=5)
    with pytest.raises(ConfigError, match="flag must be an integer"):
        options.integer("flag", 2, low=1)
    with pytest.raises(ConfigError, match="kind must be text, got 3"):
        options.text("kind")
    with pytest.raises(ConfigError, match="needs 'model', a folder"):
        options.required_text("model", "a folder")


def test_what_nobody_reads_is_refused() -> None:
    options = Options("ngram", {"method": "ngram", "adaptive": True, "prompt_lookup_mim": 2})
    options.integer("prompt_lookup_min", 2, low=1)
    with pytest.raises(ConfigError, match="did you mean 'prompt_lookup_min'"):
        options.refuse_unread()
