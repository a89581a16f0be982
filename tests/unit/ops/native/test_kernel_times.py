"""The kernels' speed is measured once, and what is kept of it is never trusted blindly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import machine
from octavo.ops.native import kernel_cases
from octavo.ops.native.kernel_cases import CASES, measure
from octavo.ops.native.kernel_times import op_seconds, ops_with_kernels
from octavo.ops.native.ops import ISAS

RUNNABLE = [name for name, problem in ISAS.items() if not problem]

pytestmark = pytest.mark.skipif(len(RUNNABLE) < 2, reason="there is no choice here")


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """An empty cache folder; grows by one with each measurement, which takes no time."""
    done: list[int] = []

    def pretend(isas: list[str]) -> dict[str, dict[str, float]]:
        done.append(1)
        return {op: {isa: 1e-6 * (1 + i) for i, isa in enumerate(isas)} for op in CASES}

    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(kernel_cases, "measure", pretend)
    op_seconds.cache_clear()
    yield done
    op_seconds.cache_clear()


def start_again() -> dict[str, dict[str, float]]:
    """What the next process would find."""
    op_seconds.cache_clear()
    return {op: dict(by_isa) for op, by_isa in op_seconds().items()}


def test_every_op_with_a_choice_has_cases() -> None:
    assert set(ops_with_kernels()) == CASES.keys()


def test_a_measurement_has_a_time_for_all() -> None:
    seconds = measure(RUNNABLE)
    assert {op: list(by_isa) for op, by_isa in seconds.items()} == dict.fromkeys(CASES, RUNNABLE)
    assert all(1e-8 < one < 1 for by_isa in seconds.values() for one in by_isa.values())


def test_measured_once(measurements: list[int]) -> None:
    first = op_seconds()
    assert op_seconds() is first
    assert start_again() == first
    assert len(measurements) == 1


@pytest.mark.parametrize("broken", ["", "[]", '{"linear": 3}', "half of what was wri"])
def test_a_broken_file_is_replaced(measurements: list[int], tmp_path: Path, broken: str) -> None:
    expected = op_seconds()
    (path,) = tmp_path.rglob("*.json")
    path.write_text(broken, encoding="utf-8")
    assert start_again() == expected
    assert start_again() == expected
    assert len(measurements) == 2


@pytest.mark.parametrize("wrong", [0, -1e-6, None, "fast", float("nan"), float("inf")])
def test_a_time_that_is_none_is_replaced(
    measurements: list[int], tmp_path: Path, wrong: object
) -> None:
    expected = op_seconds()
    (path,) = tmp_path.rglob("*.json")
    changed = json.loads(path.read_text(encoding="utf-8"))
    changed["linear"][RUNNABLE[-1]] = wrong
    path.write_text(json.dumps(changed), encoding="utf-8")
    assert start_again() == expected
    assert len(measurements) == 2


def test_another_processor_is_measured_itself(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    op_seconds()
    monkeypatch.setattr(machine, "processor", lambda: {"model name": "of tomorrow"})
    start_again()
    assert len(measurements) == 2


def test_a_folder_that_cannot_be_made(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kernels").write_text("a file is in the way")
    assert start_again().keys() == CASES.keys()
    monkeypatch.delenv("OCTAVO_CACHE_ROOT")
    monkeypatch.setattr(machine, "cache_root", _no_home)
    assert start_again().keys() == CASES.keys()
    assert len(measurements) == 2


def _no_home() -> Path:
    raise RuntimeError("no home")


def test_kernels_goes_by_the_times(tmp_path: Path) -> None:
    """In processes of their own, as a process keeps its choices."""

    def told(*flags: str) -> dict[str, dict[str, Any]]:
        command = [sys.executable, "-m", "octavo", "kernels", "--device", "cpu", "--json", *flags]
        env = {**os.environ, "OCTAVO_CACHE_ROOT": str(tmp_path)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        return {one["op"]: one for one in json.loads(done.stdout)["ops"]}

    told()
    (path,) = tmp_path.rglob("*.json")
    seconds = json.loads(path.read_text(encoding="utf-8"))
    seconds["add"] = dict.fromkeys(RUNNABLE, 2e-6) | {"portable": 1e-6}
    seconds["scale"] = dict.fromkeys(RUNNABLE, 1e-6)
    path.write_text(json.dumps(seconds), encoding="utf-8")
    ops = told()
    assert ops["add"]["implementation"] == "portable"
    assert ops["add"]["reason"] == "the fastest measured here, takes 1.0 µs"
    assert {"implementation": RUNNABLE[1], "reason": "takes 2.0 µs"} in ops["add"]["rejected"]
    assert ops["scale"]["implementation"] == RUNNABLE[-1]
    asked = told("--kernels", json.dumps({"add": RUNNABLE[1]}))
    assert asked["add"]["implementation"] == RUNNABLE[1]
    assert asked["add"]["reason"] == "asked for"
    assert asked["scale"] == ops["scale"]
