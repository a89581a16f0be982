from __future__ import annotations

import pytest

from octavo import machine
from octavo.ops.native import limits
from octavo.ops.native.limits import Limits, LimitsMeter
from octavo.ops.native.ops import ISAS


def test_limits_of_each_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PEAK_SECONDS", 1e-3)
    monkeypatch.setattr(limits, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 1 << 18)
    found = LimitsMeter(1).measure()
    isas = [name for name, problem in ISAS.items() if not problem]
    assert found.threads == 1
    assert found.memory_read_bytes == 8 << 18
    for by_isa in (found.float_operations_per_second, found.int8_operations_per_second):
        assert list(by_isa) == isas
        # A loop that a compiler has emptied would seem to do far more than any thread can.
        assert all(1e8 < value < 1e13 for value in by_isa.values())
    assert 1e8 < found.read_bytes_per_second < 1e13


def test_the_better_of_two_measurements() -> None:
    one = Limits(2, 10, 1.0, 9.0, {"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 2.0})
    other = Limits(2, 10, 3.0, 4.0, {"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 3.0})
    best = Limits(2, 10, 3.0, 9.0, {"a": 2.0, "b": 5.0}, {"a": 2.0, "b": 3.0})
    assert one.best_of(other) == other.best_of(one) == best


def test_the_slower_limit_holds() -> None:
    found = Limits(1, 0, 0.0, 100.0, {}, {})
    assert found.least_seconds(50, 10, peak=1000) == 0.5
    assert found.least_seconds(50, 900, peak=1000) == 0.9
