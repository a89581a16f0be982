"""One model on two machines, each started with `octavo serve --nnodes 2`: network namespaces."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.checkpoints import VOCAB_SIZE
from support.machines import Machine, two_machines
from support.serve_command import COMMAND, ServeProcess, serving, wait_until
from support.streams import LONG, Reader, lose_one_of_two

STAGES = ("--pipeline-parallel-size", "2")
REPLICAS = ("--data-parallel-size", "2")
KEY = "the machines' key"
GUESSES = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def words(
    machine: Machine, rank: int, *arguments: str, first: Machine, key: str = KEY
) -> list[str]:
    """Of a server on one of two machines."""
    own_processes = "--tensor-parallel-size" in arguments  # or they would share memory
    return [
        *machine.command(*COMMAND, own_processes=own_processes),
        *arguments,
        *("--nnodes", "2", "--node-rank", str(rank), "--host", machine.address),
        *("--master-addr", first.address, "--cluster-key", key),
    ]


class Agent:
    """A running machine that isn't the first."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def has_said(self, text: str) -> bool:
        return text in self.log.read_text()


@contextmanager
def taking_part(log: Path, command: list[str]) -> Iterator[Agent]:
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield Agent(process, log)
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def both(
    machines: tuple[Machine, Machine], model: Path | str, logs: Path, *arguments: str
) -> Iterator[tuple[ServeProcess, Agent]]:
    """A model on both machines; this thread is on the first."""
    first, second = machines
    settings = (str(model), *arguments)
    with (
        taking_part(logs / "second.log", words(second, 1, *settings, first=first)) as agent,
        serving(logs / "first.log", command=words(first, 0, *settings, first=first)) as server,
        first.inside(),
    ):
        yield server, agent


def health(server: ServeProcess) -> int:
    return httpx.get(f"{server.url}/health", timeout=10, verify=False).status_code


def texts(server: ServeProcess) -> list[str]:
    """Of several requests at the same time."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(20)] for _ in range(8)]

    def text(prompt: list[int]) -> str:
        reply = server.completion(prompt=prompt, temperature=0, max_tokens=12, logprobs=2)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with ThreadPoolExecutor(4) as pool:  # whose threads are on the machine of this one
        return list(pool.map(text, prompts))


def end(server: ServeProcess, agent: Agent) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert agent.process.wait(20) == 0


@pytest.mark.parametrize("layout", [STAGES, (*STAGES, *GUESSES)])
def test_two_stages_say_what_one_process_says(
    server: ServeProcess,
    machines: tuple[Machine, Machine],
    folder: Path,
    tmp_path: Path,
    layout: tuple[str, ...],
) -> None:
    with both(machines, folder, tmp_path, *layout, "--max-model-len", "256") as (pair, agent):
        at_two = texts(pair)
        assert [len(machine.processes()) for machine in machines] == [3, 2]
        assert "waiting for machine 1 to join 10.231.7.1:29501" in pair.log.read_text()
        assert agent.has_said("machine 1: starting worker 1")
        end(pair, agent)
        assert [machine.processes() for machine in machines] == [[], []]
    assert at_two == texts(server)


@pytest.mark.real
def test_the_default_model_on_two_machines(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    body = {"prompt": "Folded once, a sheet has", "temperature": 0, "max_tokens": 16}
    settings = ("default", "--dtype", "float32", "--max-model-len", "256")
    with serving(tmp_path / "alone.log", *settings) as alone:
        expected = alone.completion(**body).json()["choices"][0]["text"]
    with both(machines, settings[0], tmp_path, *settings[1:], *STAGES) as (pair, agent):
        assert pair.completion(**body).json()["choices"][0]["text"] == expected
        end(pair, agent)


def test_tensor_ranks_on_two_machines(
    server: ServeProcess, machines: tuple[Machine, Machine], folder: Path, tmp_path: Path
) -> None:
    """Where each sees its own processes alone, as machines do: they share no memory."""
    pytest.importorskip("torch")
    layout = ("--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", "256")
    with both(machines, folder, tmp_path, *layout) as (pair, _):
        at_two = texts(pair)
    assert at_two == texts(server)


def test_a_lost_machine_ends_the_service(
    machines: tuple[Machine, Machine], long_folder: Path, tmp_path: Path
) -> None:
    with both(machines, long_folder, tmp_path, *STAGES) as (server, _):
        stream = Reader(server, {**LONG, "prompt": [5]})
        assert stream.started.wait(20)
        machines[1].lose()
        stream.join(20)
        assert stream.has_failed
        assert "worker 1 (stage 1) is gone: its process or its machine" in stream.events[-2]
        assert health(server) == 503
        assert server.process.wait(20) == 1
        assert machines[0].processes() == []


def test_a_lost_first_machine_ends_the_others(
    machines: tuple[Machine, Machine], folder: Path, tmp_path: Path
) -> None:
    with both(machines, folder, tmp_path, *STAGES) as (_, agent):
        machines[0].lose()
        assert agent.process.wait(20) == 1
        assert agent.has_said("error: machine 0 is gone, or the network to it")
        assert machines[1].processes() == []


def test_a_machine_comes_back(
    server: ServeProcess, machines: tuple[Machine, Machine], long_folder: Path, tmp_path: Path
) -> None:
    layout = (*STAGES, "--restart-workers")
    long = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    with both(machines, long_folder, tmp_path, *layout) as (pair, _):
        whole = pair.completion(**long).json()["choices"][0]["text"]
        stream = Reader(pair, long)
        assert stream.started.wait(20)
        machines[1].lose()
        wait_until(lambda: health(pair) == 503, 20)
        again = words(machines[1], 1, str(long_folder), *layout, first=machines[0])
        with taking_part(tmp_path / "again.log", again) as agent:
            stream.join(60)
            assert not stream.has_failed
            assert stream.text == whole
            assert health(pair) == 200
            end(pair, agent)


def test_a_cut_link_is_noticed_by_silence(
    machines: tuple[Machine, Machine], long_folder: Path, tmp_path: Path
) -> None:
    layout = (*STAGES, "--restart-workers", "--worker-timeout", "4")
    _, second = machines
    with both(machines, long_folder, tmp_path, *layout) as (server, agent):
        stream = Reader(server, {**LONG, "max_tokens": 1000, "prompt": [5]})
        assert stream.started.wait(20)
        second.cut()
        wait_until(lambda: health(server) == 503, 20)
        assert "worker 1 (stage 1) has not answered for 4 s" in server.log.read_text()
        wait_until(lambda: len(second.processes()) == 1, 20)  # its worker has given up, too
        second.connect()
        wait_until(lambda: health(server) == 200, 60)
        stream.join(60)
        assert not stream.has_failed
        end(server, agent)


def test_a_replica_is_lost_with_its_machine(
    machines: tuple[Machine, Machine], long_folder: Path, tmp_path: Path
) -> None:
    few = ("--max-num-seqs", "4")  # so that some wait
    with both(machines, long_folder, tmp_path, *REPLICAS, *few) as (server, agent):
        assert [len(machine.processes()) for machine in machines] == [4, 2]
        lose_one_of_two(server, machines[1].lose)
        assert agent.process.wait(10) == -signal.SIGKILL


def test_a_replica_comes_back_with_its_machine(
    machines: tuple[Machine, Machine], folder: Path, tmp_path: Path
) -> None:
    layout = (*REPLICAS, "--restart-workers", "--worker-timeout", "4")
    with both(machines, folder, tmp_path, *layout) as (server, _):
        machines[1].lose()
        wait_until(lambda: server.metric("num_engines_running") == 1, 30)
        assert server.completion().status_code == 200
        again = words(machines[1], 1, str(folder), *layout, first=machines[0])
        with taking_part(tmp_path / "again.log", again) as agent:
            wait_until(lambda: server.metric("num_engines_running") == 2, 60)
            end(server, agent)


def test_who_has_another_key_is_sent_away(
    machines: tuple[Machine, Machine], folder: Path, tmp_path: Path
) -> None:
    first, second = machines
    log = tmp_path / "first.log"
    settings = (str(folder), *STAGES, "--max-num-seqs", "8")
    with taking_part(log, [*words(first, 0, *settings, first=first), "--port", "0"]) as server:
        code, stderr = ended(words(second, 1, *settings, first=first, key="guessed"))
        assert code == 1
        assert "can't join 10.231.7.1:29501: it has another --cluster-key" in stderr
        wait_until(lambda: server.has_said("10.231.7.2 tried to join without the key"), 20)

        other = (*settings[:-1], "9")
        code, stderr = ended(words(second, 1, *other, first=first))
        assert code == 1
        assert "machine 1 was started with other settings than machine 0: --max-num-seqs;" in stderr
        assert server.process.wait(20) == 1
        assert server.has_said("error: machine 1 was started with other settings than machine 0")


@pytest.mark.parametrize(
    ("rank", "said", "code"),
    [
        (0, "waiting for machine 1", 128 + signal.SIGTERM),  # as any server that isn't ready
        (1, "machine 1: joining 10.231.7.1:29501", 0),
    ],
)
def test_a_machine_that_waits_can_be_ended(
    machines: tuple[Machine, Machine], folder: Path, tmp_path: Path, rank: int, said: str, code: int
) -> None:
    command = words(machines[rank], rank, str(folder), *STAGES, first=machines[0])
    with taking_part(tmp_path / "log", command) as waiting:
        wait_until(lambda: waiting.has_said(said), 30)
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.process.wait(20) == code
    wait_until(lambda: machines[rank].processes() == [], 5)


def test_an_engine_that_waits_for_machines_ends_with_its_server(
    machines: tuple[Machine, Machine], folder: Path, tmp_path: Path
) -> None:
    first, _ = machines
    with taking_part(tmp_path / "log", words(first, 0, str(folder), *STAGES, first=first)) as one:
        wait_until(lambda: one.has_said("waiting for machine 1"), 30)
        one.process.kill()
        wait_until(lambda: first.processes() == [], 30)


def ended(command: list[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr
