"""A tiny model and a server of it, as a process, for all end-to-end tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import make_checkpoint
from support.serve_command import ServeProcess, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for requests that take about a second."""
    folder = tmp_path_factory.mktemp("served") / "long"
    return make_checkpoint("llama", folder, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(log, str(folder), "--max-num-seqs", "8", "--max-model-len", "256") as process:
        yield process
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0
