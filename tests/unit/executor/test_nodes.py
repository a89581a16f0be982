"""Machine 0 and the agents of others, all on this one; tests/e2e/test_machines.py has more."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from octavo.config import Config
from octavo.core.errors import ConfigError, EngineDeadError, NoPlaceError
from octavo.executor import nodes as module
from octavo.executor.messages import places
from octavo.executor.nodes import NodeLauncher, StartWorker, common_settings, run_agent
from octavo.executor.remote_workers import Ticket
from octavo.executor.workers import WorkerProcess
from octavo.parallel.channel import Channel, packed
from octavo.parallel.child import Child

TWO = places(1, 2)
Agent = Callable[..., "Future[None]"]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def settings(port: int) -> dict[str, object]:
    return {
        "nnodes": 2,
        "pipeline_parallel_size": 2,
        "master_port": port,
        "cluster_key": "the key",
        "worker_timeout": 20.0,
    }


@pytest.fixture
def agent(settings: dict[str, object]) -> Iterator[Agent]:
    """Starts machine 1."""

    def run(**changed: object) -> None:
        run_agent(Config.from_flat({**settings, "node_rank": 1, **changed}))

    with ThreadPoolExecutor(2) as pool:
        yield lambda **changed: pool.submit(run, **changed)


def launcher(settings: dict[str, object]) -> NodeLauncher:
    return NodeLauncher(Config.from_flat(settings), 0, node_of=[0, 1])


def launched(one: NodeLauncher) -> list[WorkerProcess]:
    workers = one.launch(TWO, [None, None])
    for worker in workers:
        worker.lifeline.settimeout(20)
        assert worker.lifeline.recv(1) == b"."  # it lives
    return workers


def end(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()
        worker.channel.close()
        worker.lifeline.close()


def test_a_machine_starts_workers_as_often_as_it_is_told_to(
    settings: dict[str, object], agent: Agent
) -> None:
    one, machine = launcher(settings), agent()
    for _ in range(2):
        end(launched(one))
    one.close()
    machine.result(20)


def test_the_key_is_not_sent(
    settings: dict[str, object], agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    send = Channel.send
    monkeypatch.setattr(
        module.Channel, "send", lambda self, message: (sent.append(message), send(self, message))[1]
    )
    one, machine = launcher(settings), agent()
    end(launched(one))
    one.close()
    machine.result(20)
    to_agent = [message for message in sent if isinstance(message, StartWorker)]
    assert len(to_agent) == 1
    assert b"the key" not in packed(to_agent[0])


def test_an_engine_that_has_failed_says_so(settings: dict[str, object], agent: Agent) -> None:
    one, machine = launcher(settings), agent()
    end(launched(one))
    one.close("worker 0 is gone")
    with pytest.raises(EngineDeadError, match="on machine 0 has ended: worker 0 is gone"):
        machine.result(20)


def test_another_machine_may_take_the_place_of_a_lost_one(
    settings: dict[str, object], agent: Agent
) -> None:
    again = {**settings, "restart_workers": True}
    with closing(launcher(again)) as one:
        first = agent(restart_workers=True)
        end(launched(one))
        one._gate.forget_agent(1)  # as if the network had gone: it joins again
        end(launched(one))
    first.result(20)


def test_a_machine_with_other_settings_is_refused(
    settings: dict[str, object], agent: Agent
) -> None:
    machine = agent(block_size=32, max_num_seqs=7, port=1234)
    why = "machine 1 was started with other settings than machine 0: --block-size, --max-num-seqs;"
    with closing(launcher(settings)) as one, pytest.raises(ConfigError, match=why):
        one.launch(TWO, [None, None])
    with pytest.raises(ConfigError, match=why):
        machine.result(20)


def test_a_machine_that_does_not_come(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGENT_SECONDS", 0.1)
    why = "machine 1 has not joined .* within 0.1 s; start it with the same command and --node-rank"
    with closing(launcher(settings)) as one, pytest.raises(NoPlaceError, match=why):
        one.launch(TWO, [None, None])


def test_a_first_machine_that_is_not_there(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGENT_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"nothing listens there.*--master-addr"):
        run_agent(Config.from_flat({**settings, "node_rank": 1}))


def test_secrets_and_what_is_a_machines_own_are_not_compared() -> None:
    compared = common_settings(Config.from_flat({}))
    assert {"model", "block_size", "master_addr", "threads"} <= compared.keys()
    assert not {"hf_token", "cluster_key", "api_key", "node_rank", "port"} & compared.keys()


def test_a_launch_without_a_key_is_remarked_on(
    settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(launcher({**settings, "cluster_key": None})):
        assert "there is no --cluster-key" in caplog.text


def test_a_worker_that_dies_before_it_has_joined_is_told(
    settings: dict[str, object], agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it for as long as it might take; and the next start is as good as any."""
    start = module._start
    monkeypatch.setattr(module, "_start", start_and_kill)
    with closing(launcher(settings)) as one:
        machine = agent()
        why = r"worker 1 .stage 1. was killed .signal 9.; has .* before it had joined"
        with pytest.raises(EngineDeadError, match=why):
            one.launch(TWO, [None, None])
        monkeypatch.setattr(module, "_start", start)
        end(launched(one))
    machine.result(20)


def start_and_kill(ticket: Ticket, gpu: str | None) -> Child:
    child = Child("octavo.executor.remote_workers", name="octavo-worker-1")
    child.kill_process()
    return child
