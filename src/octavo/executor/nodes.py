"""One model on several machines, each of which was started with the same command (`--nnodes`).

Machine 0 has the engines. On each of the others an agent joins every engine, starts the workers
that it is told to, and ends when the engines do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from octavo.config import Config, knobs
from octavo.core.errors import ConfigError, EngineDeadError, OctavoError
from octavo.executor.local_workers import LocalWorker, environment_of
from octavo.executor.messages import Place
from octavo.executor.remote_workers import Gate, Ticket
from octavo.executor.workers import WorkerProcess
from octavo.parallel.channel import Channel, plain_loads
from octavo.parallel.child import Child
from octavo.parallel.meeting import Address, join

logger = logging.getLogger("octavo")

_AGENT_SECONDS = 600.0
_NO_KEY = b"octavo"
# Sections that all machines must agree on, but for what is a machine's own.
_COMMON = ("model", "cache", "scheduler", "speculation", "backend", "parallel")
_OWN = ("node_rank", "tokenizer", "chat_template", "record_steps")


class Joined(NamedTuple):
    """An agent's first message. settings: those that all machines must agree on."""

    settings: dict[str, Any]


class StartWorker(NamedTuple):
    """To an agent: start a worker that joins with this ticket. gpu: the only one that it sees."""

    ticket: Ticket
    gpu: str | None = None


class EndWorkers(NamedTuple):
    """To an agent: end those that it has started for this engine."""


class Refused(NamedTuple):
    """To an agent that can't take part, and why."""

    why: str


class Done(NamedTuple):
    """To an agent: the engine has shut down."""


def engine_address(config: Config, replica: int) -> Address:
    """Where agents join the engine of a replica."""
    return config.parallel.master_addr, config.parallel.master_port + replica


def cluster_key(config: Config) -> bytes:
    key = config.parallel.cluster_key
    return _NO_KEY if key is None else key.encode()


def common_settings(config: Config) -> dict[str, Any]:
    flat = config.to_flat()
    return {
        spec.name: flat[spec.name]
        for spec in knobs()
        if spec.section in _COMMON and spec.name not in _OWN and not spec.secret
    }


# --- the engine's side ----------------------------------------------------------------------------


class NodeLauncher:
    """Starts the workers of one engine, here and on other machines."""

    def __init__(self, config: Config, replica: int, node_of: Sequence[int]) -> None:
        """node_of: by rank. Raises ConfigError if --master-addr can't be listened on."""
        parallel = config.parallel
        if parallel.cluster_key is None:
            logger.warning(
                "there is no --cluster-key: until all machines have joined, whoever reaches %s:%d "
                "could join in their place",
                *engine_address(config, replica),
            )
        host, port = engine_address(config, replica)
        self._timeout_s = parallel.worker_timeout
        self._gate = Gate(host, port, cluster_key(config), self._timeout_s)
        self._settings = common_settings(config)
        self._node_of = node_of

    def launch(self, places: Sequence[Place], gpus: Sequence[str | None]) -> list[WorkerProcess]:
        """Raises ConfigError if a machine or a worker doesn't come."""
        processes: dict[int, WorkerProcess] = {}
        tickets: dict[int, tuple[Ticket, int]] = {}
        try:
            for place, gpu in zip(places, gpus, strict=True):
                node = self._node_of[place.rank]
                if node == 0:
                    processes[place.rank] = LocalWorker(place, self._timeout_s, gpu=gpu)
                    continue
                tickets[place.rank] = ticket, _ = self._gate.ticket(place), node
                self._agent(node).send(StartWorker(ticket, gpu))
            for place in places:
                if place.rank in tickets:
                    ticket, node = tickets[place.rank]
                    end = partial(self._end_workers, node)
                    processes[place.rank] = self._gate.admit(ticket, place, end)
        except EOFError:
            _kill(processes)
            raise ConfigError("a machine was lost while workers were started on it") from None
        except BaseException:
            _kill(processes)
            raise
        return [processes[place.rank] for place in places]

    def close(self) -> None:
        for node in {node for node in self._node_of if node}:
            with suppress(EOFError, ConfigError):
                self._gate.agent(node, 0).send(Done())
        self._gate.close()

    def _agent(self, node: int) -> Channel:
        """Raises ConfigError if it doesn't come, or comes with other settings."""
        channel = self._gate.agent(node, _AGENT_SECONDS)
        try:
            messages = channel.receive_all(wait=False)
        except EOFError:  # an earlier one
            self._gate.forget_agent(node)
            return self._agent(node)
        for message in messages:
            self._check(channel, node, message)
        return channel

    def _check(self, channel: Channel, node: int, joined: Joined) -> None:
        theirs: Mapping[str, Any] = joined.settings
        different = sorted(
            name for name, ours in self._settings.items() if theirs.get(name) != ours
        )
        if different:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in different)
            why = (
                f"machine {node} was started with other settings than machine 0: {flags}; start "
                "all machines with the same command, but for --node-rank"
            )
            channel.send(Refused(why))
            raise ConfigError(why)

    def _end_workers(self, node: int) -> None:
        with suppress(EOFError, ConfigError):
            self._gate.agent(node, 0).send(EndWorkers())


def _kill(processes: Mapping[int, WorkerProcess]) -> None:
    for process in processes.values():
        process.kill()


# --- the other machines' side ---------------------------------------------------------------------


def run_agent(config: Config) -> None:
    """Until the engines have ended. Raises ConfigError if they can't be joined or refuse,
    EngineDeadError when machine 0 is lost.
    """
    outcomes: list[Exception] = []
    threads = [
        threading.Thread(target=_serve, args=(config, replica, outcomes), daemon=True)
        for replica in range(config.parallel.data_parallel_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if outcomes:
        raise outcomes[0]


def _serve(config: Config, replica: int, outcomes: list[Exception]) -> None:
    try:
        while not _serve_engine(config, replica):
            logger.warning("the engine on machine 0 is gone; waiting for it to come back")
    except OctavoError as error:  # for the thread that waits
        outcomes.append(error)


def _serve_engine(config: Config, replica: int) -> bool:
    """Whether the engine has ended as it should; False if it is lost and may come back."""
    address, node = engine_address(config, replica), config.parallel.node_rank
    control = join(address, cluster_key(config), {"node": node}, timeout_s=_AGENT_SECONDS)
    channel = Channel(control, plain_loads)
    logger.info("joined the engine at %s:%d as machine %d", *address, node)
    children: list[Child] = []
    try:
        channel.send(Joined(common_settings(config)))
        while True:
            match channel.receive():
                case StartWorker(ticket, gpu):
                    children = [child for child in children if child.is_alive]
                    children.append(_start(ticket, gpu))
                case EndWorkers():
                    _end(children)
                case Refused(why):
                    raise ConfigError(why)
                case Done():
                    return True
    except EOFError:
        if not config.parallel.restart_workers:
            raise EngineDeadError("machine 0 is gone, or the network to it") from None
        return False
    finally:
        _end(children)
        channel.close()


def _start(ticket: Ticket, gpu: str | None) -> Child:
    child = Child(
        "octavo.executor.remote_workers",
        name=f"octavo-worker-{ticket.rank}",
        environment=environment_of(gpu),
    )
    child.channel.send(ticket)
    return child


def _end(children: list[Child]) -> None:
    for child in children:
        child.kill()
    children.clear()
