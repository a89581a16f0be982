from __future__ import annotations

from typing import Any

import pytest

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.decisions import speculation
from octavo.speculative_config import (
    DEFAULT_LENGTH,
    parse_speculative_config,
    speculative_config,
)


@pytest.mark.parametrize(
    ("value", "methods"),
    [
        ("off", []),
        ("", []),
        ("ngram", [{"method": "ngram"}]),
        ("ngram:4", [{"method": "ngram", "num_speculative_tokens": 4}]),
        (
            "suffix + eagle:3",
            [{"method": "suffix"}, {"method": "eagle", "num_speculative_tokens": 3}],
        ),
        ('{"method": "ngram"}', [{"method": "ngram"}]),
        (
            '[{"method": "ngram"}, {"method": "suffix"}]',
            [{"method": "ngram"}, {"method": "suffix"}],
        ),
        ({"model": "org/small"}, [{"model": "org/small"}]),
    ],
)
def test_every_form_is_read(value: Any, methods: list[dict[str, Any]]) -> None:
    assert parse_speculative_config(value) == methods


@pytest.mark.parametrize("value", ["{oops", "[1, 2]", "ngram:x", ":4", 7, '"ngram"x'])
def test_what_is_not_understood_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        speculative_config(parse_speculative_config(value))


def test_a_model_by_itself_is_a_draft_model() -> None:
    (method,) = speculative_config([{"model": "org/small"}]).methods
    assert method["method"] == "draft_model"


def test_the_longest_counts() -> None:
    config = speculative_config(
        [{"method": "ngram", "num_speculative_tokens": 24}, {"method": "x"}]
    )
    assert (config.max_length, config.is_adaptive) == (24, True)
    assert speculative_config([{"method": "ngram"}]).max_length == DEFAULT_LENGTH


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens .* got 0"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "adaptive": "yes"}, "adaptive must be true or false"),
        ({"num_speculative_tokens": 3}, 'without a "method"'),
        ({"method": 3}, '"method" must be a name, .* got 3'),
        ({"method": None, "model": "org/small"}, "got None"),
    ],
)
def test_values_out_of_range_are_named(method: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_config([method])


def test_fixed_lengths_take_one_method() -> None:
    with pytest.raises(ConfigError, match="takes one method"):
        speculative_config([{"method": "ngram", "adaptive": False}, {"method": "suffix"}])


@pytest.mark.parametrize(
    "methods",
    [
        [{"method": "ngram"}, {"method": "suffix"}, {"method": "ngram", "prompt_lookup_min": 3}],
        [{"method": "draft_model", "model": "org/small"}, {"model": "org/smaller"}],
    ],
)
def test_a_method_is_named_once(methods: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=f"names method {methods[0]['method']} twice"):
        speculative_config(methods)


def test_the_setting_takes_objects_as_vllm_does() -> None:
    config = Config.from_flat(
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    )
    assert config.speculation.parsed.methods == ({"method": "ngram", "num_speculative_tokens": 3},)
    assert Config.from_flat(config.to_flat()) == config


def test_a_mistake_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        Config.from_flat({"speculative_config": "{method: ngram}"})


@pytest.mark.parametrize(
    ("value", "shown", "reason"),
    [
        ("ngram", "ngram up to 16 tokens", "how many is decided for each step"),
        ("ngram:8+suffix", "ngram up to 8, suffix up to 16 tokens", "which, and how many, is"),
        ({"model": "org/small"}, "draft_model up to 16 tokens", "how many is decided"),
        ('{"method": "ngram", "adaptive": false}', "ngram up to 16 tokens", "always as many"),
    ],
)
def test_what_is_shown_at_start(value: Any, shown: str, reason: str) -> None:
    (decision,) = speculation(speculative_config(parse_speculative_config(value)))
    assert (decision.what, decision.value) == ("speculation", shown)
    assert reason in decision.reason


def test_nothing_is_shown_without_speculation() -> None:
    assert speculation(speculative_config([])) == ()
