"""Rotary tables without a model: derived lengths, spellings, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.layers.rope import RopeTable

YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def test_default_table_is_the_formula() -> None:
    table = RopeTable(8, {"rope_theta": 100.0}, 32).compute(32)
    angles = np.arange(32)[:, None] * 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(table[:, :4], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(table[:, 4:], np.sin(angles), atol=1e-5)
    assert table.dtype == np.float32


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_extends_the_context(key: str) -> None:
    """MDL-02: factor 4 on 64 positions is 256, when the config gives no larger one."""
    assert RopeTable(16, {key: "yarn", **YARN}, 64).max_position == 256
    assert RopeTable(16, {key: "yarn", **YARN}, 512).max_position == 512


def test_spellings_are_equal() -> None:
    tables = [RopeTable(16, {key: "yarn", **YARN}, 64) for key in ("type", "rope_type")]
    assert np.array_equal(tables[0].compute(256), tables[1].compute(256))


def test_only_yarn_and_dynamic_extend_the_context() -> None:
    assert RopeTable(16, {"rope_type": "linear", "factor": 4}, 64).max_position == 64
    assert RopeTable(16, {"rope_type": "dynamic", "factor": 4}, 64).max_position == 256
    assert RopeTable(16, {}, 64).max_position == 64


def test_dynamic_leaves_lengths_within_the_context_alone() -> None:
    plain, dynamic = RopeTable(16, {}, 64), RopeTable(16, {"type": "dynamic", "factor": 4}, 64)
    assert np.array_equal(plain.compute(64), dynamic.compute(64))
    assert not np.array_equal(plain.compute(65), dynamic.compute(65))


def test_freq_factors_divide_the_frequencies() -> None:
    parameters = {"rope_type": "freq_factors", "factors": [1.0, 2.0, 4.0, 8.0]}
    scaled, plain = RopeTable(8, parameters, 32), RopeTable(8, {}, 32)
    np.testing.assert_allclose(
        scaled.frequencies(32)[0] * [1.0, 2.0, 4.0, 8.0], plain.frequencies(32)[0], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not built yet.*default, linear, dynamic.*yarn"),
        ({"type": "longrope"}, "'short_factor' must be 8 positive numbers"),
        ({"rope_type": "linear"}, "'factor' must be a positive number, got None"),
        ({"rope_type": "linear", "factor": -2}, "'factor'.*-2"),
        ({"rope_type": "linear", "factor": float("nan")}, "'factor'.*nan"),
        ({"rope_type": "llama3", "factor": 8}, "'low_freq_factor'"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "'high_freq_factor'.*above",
        ),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"rope_type": "freq_factors", "factors": [1.0]}, "'factors' must be 8 positive numbers"),
        (
            {"rope_type": "freq_factors", "factors": [0.0] * 8},
            "'factors' must be 8 positive numbers",
        ),
    ],
)
def test_bad_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeTable(16, parameters, 64)
