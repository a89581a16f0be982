"""The speed of this machine's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench import op_speeds
from octavo.bench.op_speeds import machine_speeds, measured_cost
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.core.weight_format import weight_format
from octavo.simulator.measured import MachineSpeeds
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.roofline import Deployment
from octavo.simulator.work import AttentionWork, StepWork
from support.public_configs import QWEN2_5_500M


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(op_speeds, "_ROWS", (1, 8, 64))
    monkeypatch.setattr(op_speeds, "_OUTPUTS", 128)
    monkeypatch.setattr(op_speeds, "_INPUTS", 256)
    monkeypatch.setattr(op_speeds, "_DOUBT", 1e9)  # so small products scatter


def test_what_was_measured_is_kept_and_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine_speeds(["int8"], ["bfloat16"])
    assert set(first.linear) == {"int8"}
    curve = first.linear["int8"]
    assert [rows for rows, _ in curve] == [1, 8, 64]
    assert all(1e-13 < seconds < 1e-6 for _, seconds in curve)
    assert curve[-1][1] > curve[0][1]
    assert 1e-13 < first.decoding["bfloat16"] < 1e-7
    assert 1e-14 < first.chunks["bfloat16"] < 1e-8
    more = machine_speeds(["float32"], [])
    assert more.linear["int8"] == curve
    assert set(more.linear) == {"int8", "float32"}
    monkeypatch.setattr(op_speeds, "_linear", None)  # would fail if anything was measured again
    assert machine_speeds(["int8", "float32"], ["bfloat16"]) == more


@pytest.mark.parametrize(("times_as_slow", "is_kept"), [(0.2, True), (1.2, True), (1.4, False)])
def test_speeds_that_were_measured_beside_other_work_are_measured_again(
    times_as_slow: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """times_as_slow: as it is now."""
    monkeypatch.setattr(op_speeds, "_DOUBT", 1.3)
    seconds = times_as_slow
    monkeypatch.setattr(op_speeds, "_weight_seconds", lambda *args: seconds)
    first = machine_speeds(["int8", "float32"], ["bfloat16"])
    seconds = 1.0
    again = machine_speeds(["int8"], ["bfloat16"])
    assert again.linear["int8"][0] == (1, times_as_slow if is_kept else 1.0)
    assert (again == first) == is_kept
    assert machine_speeds(["int8"], []) == again


def test_a_broken_file_is_measured_again(tmp_path: Path) -> None:
    machine_speeds(["int8"], [])
    [path] = (tmp_path / "speeds").glob("*.json")
    path.write_text("{")
    assert set(machine_speeds(["int8"], []).linear) == {"int8"}
    assert MachineSpeeds.load(path) is not None


def test_formats_without_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no kernel has weights in int3; use float32"):
        machine_speeds(["int3"], [])
    with pytest.raises(ConfigError, match=r"no kernel has a KV cache in float16; use float32"):
        machine_speeds(["int8"], ["float16"])


def test_a_model_that_is_not_here_has_costs() -> None:
    deployment = Deployment(
        matrices=weight_format("q4_0"), rest=weight_format("q8_0"), kv=KVFormat("bfloat16")
    )
    cost = measured_cost(spec_from_config(QWEN2_5_500M), deployment)
    one = StepWork(1, 1, 1, 0, 0, 0, 0, (AttentionWork(None, 100, 0, 0, 0),))
    assert cost.seconds(one._replace(num_tokens=64)) > cost.seconds(one) > 1e-4
