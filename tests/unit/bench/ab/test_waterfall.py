from __future__ import annotations

import math
from itertools import pairwise

import pytest

from octavo.bench.ab.results import Verdict
from octavo.bench.ab.waterfall import Rung, ladder, waterfall
from octavo.bench.launch import parse_arm
from octavo.core.errors import InvariantError
from support import ab_blocks

SPEEDS = {"naive": 0.02, "static": 0.01, "same": 0.01, "fast": 0.0025}
RUNGS = [Rung(parse_arm(f"{name}=octavo"), f"change to {name}") for name in SPEEDS]


def test_the_factors_multiply_to_the_total() -> None:
    found = waterfall(RUNGS, ab_blocks.blocks(SPEEDS, rounds=4))
    assert found is not None
    assert [step.name for step in found.steps] == ["static", "same", "fast"]
    product = math.prod(step.factor.value for step in found.steps)
    assert product == pytest.approx(found.total.value, rel=1e-12)
    assert found.total.value == pytest.approx(8, rel=0.1)
    assert found.first_rate * found.total.value == pytest.approx(found.steps[-1].output_rate)


def test_each_step_is_judged() -> None:
    found = waterfall(RUNGS, ab_blocks.blocks(SPEEDS, rounds=4))
    assert found is not None
    verdicts = [step.verdict for step in found.steps]
    assert verdicts == [Verdict.FASTER, Verdict.NO_DIFFERENCE, Verdict.FASTER]
    once = waterfall(RUNGS, ab_blocks.blocks(SPEEDS, rounds=1))
    assert once is not None
    assert {step.verdict for step in once.steps} == {Verdict.UNKNOWN}


def test_rungs_of_different_rounds_have_no_product() -> None:
    blocks = ab_blocks.blocks(SPEEDS, rounds=2)
    with pytest.raises(InvariantError):
        waterfall(RUNGS, blocks[:-1])


def test_the_ladder_changes_one_thing_at_a_time(tiny: str) -> None:
    rungs = ladder(tiny, 80)
    words = [set(rung.arm.text.split()) for rung in rungs]
    removed = [before - after for before, after in pairwise(words[2:])]
    assert removed == [
        {"--batching", "static"},
        {"--kv-policy", "reserve-max"},
        {"--backend", "torch"},
        {"--dtype", "float32"},
    ]
    assert all(after <= before for before, after in pairwise(words[2:]))
    assert all(str(8 * 80 * 512) in its for its in words[1:])
