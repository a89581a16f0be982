from __future__ import annotations

from typing import Any

import pytest

from octavo.advisor.tuning.knobs import NOT_TRIED, knob_space
from octavo.advisor.tuning.space import Space
from octavo.config import Config, knobs
from octavo.core.errors import ConfigError


def space(*asked: str, num_cpus: int = 8, **fixed: Any) -> Space:
    return knob_space(asked, fixed=fixed, num_cpus=num_cpus)


def values(found: Space, name: str) -> tuple[Any, ...]:
    return next(d.values for d in found.dimensions if d.name == name)


def test_every_knob_of_the_engine_is_tried_or_has_a_reason_why_not() -> None:
    tried = {dimension.name for dimension in space().dimensions}
    sections = ("cache", "scheduler", "speculation", "backend")
    assert tried | set(NOT_TRIED) == {k.name for k in knobs() if k.section in sections}
    assert not tried & set(NOT_TRIED)


def test_every_value_is_one_that_the_configuration_takes() -> None:
    for dimension in space().dimensions:
        for value in dimension.values[1:]:
            Config.from_flat({dimension.name: value})


def test_what_is_the_default_anyway_is_not_tried_again() -> None:
    assert values(space(), "max_num_seqs") == (None, 4, 8, 16, 32, 64, 256, 512)
    assert values(space(), "enable_chunked_prefill") == (None, False)
    assert values(space(), "block_size") == (None, 8, 32, 64)


@pytest.mark.parametrize(
    ("num_cpus", "threads"), [(1, (None,)), (2, (None, 1)), (8, (None, 1, 2, 4, 7))]
)
def test_threads_go_up_to_the_machines(num_cpus: int, threads: tuple[Any, ...]) -> None:
    assert values(space(num_cpus=num_cpus), "threads") == threads


def test_what_the_user_has_set_is_left_alone() -> None:
    assert "max_num_seqs" not in {d.name for d in space(max_num_seqs="8").dimensions}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("max_num_seqs=8,24", (None, 8, 24)),
        ("--max-num-seqs=24,8,default,128", (None, 8, 24)),
        ("max_num_seqs=8..40", (None, 8, 16, 32)),
        ("max_num_seqs", (None, 4, 8, 16, 32, 64, 256, 512)),
        ("quantization=int8,int4", (None, "int8", "int4")),
        ("speculative=off,ngram:4", (None, "ngram:4")),
        ("batching", (None, "static")),
        ("device-memory-utilization=0.5,0.9", (None, 0.5, 0.9)),
    ],
)
def test_knobs_that_are_asked_for(asked: str, expected: tuple[Any, ...]) -> None:
    (dimension,) = space(asked).dimensions
    assert dimension.values == expected


def test_the_default_set_and_one_more() -> None:
    found = space("default", "quantization=int8")
    assert values(found, "quantization") == (None, "int8")
    assert "max_num_seqs" in {d.name for d in found.dimensions}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("max_num_sequences=4", "did you mean 'max_num_seqs'"),
        ("max_num_seqs=0", "at least 1"),
        ("max_num_seqs=many", "a number"),
        ("max_num_seqs=8..4", "LOW the smaller"),
        ("quantization=a..b", "must be one of"),
        ("kv_cache_memory_bytes", "needs values"),
        ("port=1,2", "unknown setting"),
    ],
)
def test_mistakes_are_told(asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space(asked)


def test_a_knob_that_is_set_can_not_be_tuned() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        space("max_num_seqs=4,8", max_num_seqs="8")
