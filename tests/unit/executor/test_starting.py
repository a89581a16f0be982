"""What workers are given when they are started, and where none can be."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import Config, knobs
from octavo.core.errors import ConfigError
from octavo.executor import starting
from octavo.executor.messages import Setup, places
from octavo.executor.starting import worker_starter
from octavo.parallel.channel import packed

SECRET = "what nobody may know"


def given(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[list[Setup]]:
    """Setups of the workers of two starts in a row."""
    starts: list[list[Setup]] = []

    def workers(launch: object, setups: list[Setup], *, timeout_s: float) -> None:
        assert timeout_s == config.parallel.worker_timeout
        starts.append(setups)

    monkeypatch.setattr(starting, "Workers", workers)
    config = Config.from_flat(settings)
    start, launcher = worker_starter(config, 320, "the checkpoint", 0)  # type: ignore[arg-type]
    start()
    start()
    launcher.close()
    return starts


def test_each_has_its_place_and_all_have_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    first, second = given(monkeypatch, **layout, block_size=32, worker_timeout=3.0)
    assert [setup.place for setup in first] == places(2, 2)
    assert [(setup.local_rank, setup.num_local) for setup in first] == [(i, 4) for i in range(4)]
    for setup in first:
        assert Config.from_flat(setup.settings).cache.block_size == 32
        assert (setup.vocab_size, setup.checkpoint, setup.host) == (
            320,
            "the checkpoint",
            "127.0.0.1",
        )
    assert len({setup.key for setup in first}) == 1
    assert first[0].key != second[0].key, "workers of an earlier start are strangers"
    assert len(first[0].key) >= 32


def test_no_secret_is_given_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [knob.name for knob in knobs() if knob.secret]
    assert {"hf_token", "cluster_key", "api_key"} <= set(names)
    plain = Config().to_flat()
    secrets = {name: [SECRET] if isinstance(plain[name], list) else SECRET for name in names}
    for setups in given(monkeypatch, tensor_parallel_size=2, **secrets):
        for setup in setups:
            assert SECRET.encode() not in packed(setup)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nnodes": 3, "pipeline_parallel_size": 2}, "--nnodes 3"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "node_rank": 1}, "runs on machine 0 alone"),
        ({"nnodes": 2, "node_rank": 2, "pipeline_parallel_size": 2}, "--node-rank 2"),
        (
            {"nnodes": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
            "does not go with --distributed-executor-backend ray",
        ),
    ],
)
def test_layouts_that_cannot_be_started(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        worker_starter(Config.from_flat(settings), 320, None, 0)  # type: ignore[arg-type]
