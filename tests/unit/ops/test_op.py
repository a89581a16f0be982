"""Which implementation a call goes to. The ops and backends here are the test's own."""

from __future__ import annotations

import importlib

import pytest

from octavo.core.errors import ConfigError, InvariantError
from octavo.ops.op import OPS, Choice, Op, Target, choose_all, implements, op
from support.backends import torch_backend

WIDE, NARROW = Target("cpu", "float32"), Target("cpu", "bfloat16")


class Direct:
    """An array of the test's backend. dtype: its target's."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype


class Symbolic(Direct):
    """Another kind of array of the same backend."""


def target_of(array: Direct) -> Target:
    return Target("cpu", array.dtype)


def only_wide(target: Target) -> str | None:
    return None if target == WIDE else "only for float32"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Op[[Direct], str]:
    """An op with a slow and a fast implementation for Direct, and one for Symbolic."""
    monkeypatch.setattr(importlib.import_module("octavo.ops.op"), "OPS", {})

    @op
    def double(x: Direct) -> str:
        raise NotImplementedError

    @implements(double, backend="own", array_type=Direct)
    def slow(x: Direct) -> str:
        return "slow"

    @implements(
        double, backend="own", array_type=Direct, name="quick", unsupported=only_wide, rank=1
    )
    def quick(x: Direct) -> str:
        return "quick"

    @implements(double, backend="own", array_type=Symbolic)
    def recorded(x: Symbolic) -> str:
        return "recorded"

    return double


def choose(target: Target, **asked: str) -> dict[type, str]:
    """Name of the implementation chosen for each array type."""
    choices = choose_all("own", target, asked, target_of)
    return {c.implementation.array_type: c.implementation.name for c in choices}


def test_each_array_type_of_a_backend_has_its_choice(double: Op[[Direct], str]) -> None:
    assert choose(WIDE) == {Direct: "quick", Symbolic: "reference"}
    assert double(Direct()) == "quick"
    assert double(Symbolic()) == "recorded"


def test_measured_times_decide_before_ranks(double: Op[[Direct], str]) -> None:
    def chosen(seconds: dict[str, float], name: str | None = None) -> Choice:
        return double.choices("own", WIDE, name, seconds)[0]

    slow_is_fast = chosen({"reference": 1e-6, "quick": 2e-6})
    assert slow_is_fast.implementation.name == "reference"
    assert slow_is_fast.reason == "the fastest measured here, takes 1.0 µs"
    assert slow_is_fast.rejected == (("quick", "takes 2.0 µs"),)
    much_alike = chosen({"reference": 1e-6, "quick": 1.3e-6})
    assert much_alike.implementation.name == "quick"
    assert much_alike.reason == "as fast as any measured here, takes 1.3 µs"
    assert much_alike.rejected == (("reference", "takes 1.0 µs, which is no difference"),)
    asked = chosen({"reference": 1e-6, "quick": 2e-6}, "quick")
    assert asked.implementation.name == "quick"
    assert asked.rejected == (("reference", "not asked for"),)
    (narrow, _) = double.choices("own", NARROW, None, {"reference": 2e-6, "quick": 1e-6})
    assert narrow.implementation.name == "reference"
    assert narrow.rejected == (("quick", "only for float32"),)


def test_targets_live_side_by_side(double: Op[[Direct], str]) -> None:
    choose(WIDE)
    assert choose(NARROW)[Direct] == "reference"
    assert double(Direct("float32")) == "quick"
    assert double(Direct("bfloat16")) == "slow"
    with pytest.raises(InvariantError, match="op double: nothing chosen for float16 on cpu"):
        double(Direct("float16"))


def test_one_target_keeps_its_choice(double: Op[[Direct], str]) -> None:
    choose(WIDE, double="quick")
    choose(WIDE)  # the same
    with pytest.raises(ConfigError, match=r"runs 'quick' float32 on cpu.*'reference' needs"):
        choose(WIDE, double="reference")
    assert double(Direct()) == "quick"


def test_a_named_implementation_that_cannot_run_is_an_error(double: Op[[Direct], str]) -> None:
    with pytest.raises(ConfigError, match="'quick' can't run bfloat16 on cpu: only for float32"):
        choose(NARROW, double="quick")
    with pytest.raises(ConfigError, match="no own implementation 'magic'; there are: reference, q"):
        choose(WIDE, double="magic")
    with pytest.raises(ConfigError, match="unknown op 'triple'; ops: double"):
        choose(WIDE, triple="quick")
    with pytest.raises(InvariantError, match="nothing chosen for arrays of type Direct"):
        double(Direct())


def test_the_first_argument_is_positional(double: Op[[Direct], str]) -> None:
    choose(WIDE)
    with pytest.raises(InvariantError, match="op double: the first argument must be given by posi"):
        double(x=Direct())


def test_onednn_is_chosen_only_where_it_runs() -> None:
    backend = torch_backend()
    for dtype, expected in (("float32", "onednn"), ("bfloat16", "reference")):
        (linear,) = [c for c in backend.choose(dtype, {}) if c.op == "linear"]
        assert linear.implementation.name == expected
    assert linear.rejected == (("onednn", "only for float32 on CPUs"),)
    (on_gpu,) = OPS["linear"].choices("torch", Target("cuda", "float32"))
    assert on_gpu.implementation.name == "reference"
    with pytest.raises(ConfigError, match="op linear: 'onednn' can't run bfloat16 on cpu"):
        backend.choose("bfloat16", {"linear": "onednn"})
