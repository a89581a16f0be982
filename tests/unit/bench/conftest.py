"""Measurements that take milliseconds: small memory, short loops, a tiny model."""

from __future__ import annotations

import pytest

from octavo import machine
from octavo.bench import op_case
from octavo.ops.native import limits
from support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("bench")))


@pytest.fixture
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and ops are measured, but hardly."""
    monkeypatch.setattr(limits, "_PEAK_SECONDS", 1e-3)
    monkeypatch.setattr(limits, "_ROUNDS", 1)
    monkeypatch.setattr(op_case, "_REPLAY_SECONDS", 1e-4)
    monkeypatch.setattr(limits, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 1 << 16)
