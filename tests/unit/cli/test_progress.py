"""The bar of loading, on a terminal and elsewhere."""

from __future__ import annotations

import io
import pickle

import pytest

from octavo.cli.progress import LoadingBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(bar: LoadingBar) -> None:
    for done in (0, 50_000_000, 100_000_000):
        bar(done, 100_000_000)


def test_two_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    load(pickle.loads(pickle.dumps(LoadingBar())))  # the engine's process calls it
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Loading weights"
    assert lines[1].startswith("Loaded weights in ")
    assert len(lines) == 2


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    load(LoadingBar())
    assert "Loading weights" in terminal.getvalue()
    assert "Loaded weights in" in terminal.getvalue()
