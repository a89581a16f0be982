"""One model on several machines, each of which was started with the same command (`--nnodes`).

Machine 0 has the engines. On each of the others an agent joins every engine, starts the workers
that it is told to, and ends when the engines do.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from octavo.config import Config, knobs
from octavo.core.errors import ConfigError, EngineDeadError, OctavoError
from octavo.executor.local_workers import LocalWorker, ending, environment_of
from octavo.executor.messages import Place
from octavo.executor.remote_workers import Gate, Ticket
from octavo.executor.seats import check_machines, replicas_on
from octavo.executor.workers import WorkerProcess
from octavo.parallel.channel import Channel, plain_loads
from octavo.parallel.child import Child
from octavo.parallel.meeting import Address, join

logger = logging.getLogger("octavo")

_AGENT_SECONDS = 600.0
_LOOK_SECONDS = 1.0
"""Between looks at workers."""
_UNNOTICED_SECONDS = 15.0
"""So long may a connection to a machine that has fallen silent look alive."""
_NO_KEY = b"octavo"
# Sections that all machines must agree on, but for what is a machine's own.
_COMMON = ("model", "cache", "scheduler", "speculation", "backend", "parallel")
_OWN = ("node_rank", "tokenizer", "chat_template", "record_steps")


class Call(NamedTuple):
    """To an agent: is it there? It answers with `Present`."""


class Present(NamedTuple):
    """An agent's answer. settings: those that all machines must agree on."""

    settings: dict[str, Any]


class StartWorker(NamedTuple):
    """To an agent: start a worker that joins with this ticket, and with the key that the agent has:
    it is not sent. gpu: the only one that it sees.
    """

    ticket: Ticket
    gpu: str | None = None


class WorkerEnded(NamedTuple):
    """From an agent: the worker with the ticket of this number has ended unbidden."""

    number: int
    how: str


class EndWorkers(NamedTuple):
    """To an agent: end those that it has started for this engine."""


class Refused(NamedTuple):
    """To an agent that can't take part, and why."""

    why: str


class Done(NamedTuple):
    """To an agent: the engine has ended. error: None if it was told to."""

    error: str | None


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
        self._wait_s = _AGENT_SECONDS
        # Requests of an engine that waits for a machine may be better off with another engine.
        self._wait_again_s = self._timeout_s if parallel.data_parallel_size > 1 else _AGENT_SECONDS

    def launch(self, places: Sequence[Place], gpus: Sequence[str | None]) -> list[WorkerProcess]:
        """Raises NoPlaceError if a machine doesn't come, ConfigError if a worker doesn't."""
        processes: dict[int, WorkerProcess] = {}
        tickets: list[tuple[Place, Ticket, int, Channel]] = []
        try:
            agents = {node: self._agent(node) for node in sorted({*self._node_of} - {0})}
            for place, gpu in zip(places, gpus, strict=True):
                node = self._node_of[place.rank]
                if node == 0:
                    processes[place.rank] = LocalWorker(place, self._timeout_s, gpu=gpu)
                    continue
                ticket = self._gate.ticket(place)
                agents[node].send(StartWorker(ticket._replace(key=b""), gpu))
                tickets.append((place, ticket, node, agents[node]))
            for place, ticket, node, agent in tickets:
                processes[place.rank] = self._gate.admit(
                    ticket,
                    place,
                    partial(self._end_workers, node),
                    partial(_look_after, agent, ticket, place),
                )
        except BaseException as error:
            for process in processes.values():
                process.kill()
                process.channel.close()
                process.lifeline.close()
            for _, _, node, _ in tickets:
                self._end_workers(node)
            if isinstance(error, EOFError):
                raise ConfigError("a machine was lost while workers were started on it") from None
            raise
        self._wait_s = self._wait_again_s
        return [processes[place.rank] for place in places]

    def close(self, error: str | None = None) -> None:
        for node in {node for node in self._node_of if node}:
            self._tell(node, Done(error))
        self._gate.close()

    def _agent(self, node: int) -> Channel:
        """One that answers. Raises NoPlaceError if none comes, ConfigError for other settings."""
        limit = time.monotonic() + self._wait_s
        while True:
            channel = self._gate.agent(node, max(0.0, limit - time.monotonic()))
            with suppress(EOFError):
                channel.send(Call())
                if (present := _answer(channel, self._timeout_s)) is not None:
                    self._check(channel, node, present.settings)
                    return channel
            self._gate.forget_agent(node)  # it may join again, or another in its place

    def _check(self, channel: Channel, node: int, theirs: Mapping[str, Any]) -> None:
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
        self._tell(node, EndWorkers())

    def _tell(self, node: int, message: EndWorkers | Done) -> None:
        """If it is there to hear it."""
        if (agent := self._gate.known_agent(node)) is not None:
            with suppress(EOFError):
                agent.send(message)


def _answer(agent: Channel, timeout_s: float) -> Present | None:
    """To a `Call`; None if it doesn't come in time. Raises EOFError."""
    limit = time.monotonic() + timeout_s
    while (left := limit - time.monotonic()) > 0:
        for message in agent.receive_all(wait=True, timeout_s=left):
            if isinstance(message, Present):
                return message
    return None


def _look_after(agent: Channel, ticket: Ticket, place: Place) -> None:
    """Raises EOFError if the agent is gone, EngineDeadError if the worker is."""
    for message in agent.receive_all(wait=False):
        if isinstance(message, WorkerEnded) and message.number == ticket.number:
            raise EngineDeadError(f"{place} {message.how} before it had joined")


# --- the other machines' side ---------------------------------------------------------------------


def run_agent(config: Config) -> None:
    """Take part as machine --node-rank until the engines have ended. Raises ConfigError if they
    can't be joined or refuse, EngineDeadError when they have died or machine 0 is lost.
    """
    check_machines(config.parallel)
    replicas = replicas_on(config.parallel, config.parallel.node_rank)
    outcomes: SimpleQueue[Exception | None] = SimpleQueue()
    for replica in replicas:
        threading.Thread(
            target=_serve, args=(config, replica, outcomes.put), name="octavo-agent", daemon=True
        ).start()
    deaths: list[EngineDeadError] = []
    for _ in replicas:
        match outcomes.get():
            case None:
                pass
            case EngineDeadError() as death:  # others may live
                deaths.append(death)
            case error:
                raise error
    if deaths:
        raise deaths[0]


def _serve(config: Config, replica: int, ended: Callable[[Exception | None], None]) -> None:
    """One engine, as often as it comes back."""
    try:
        while (loss := _serve_engine(config, replica)) is not None:
            if not config.parallel.restart_workers:
                raise EngineDeadError(loss)
            logger.warning("%s; waiting for it to come back", loss)
    except OctavoError as error:
        ended(error)
    except Exception as error:  # the thread that waits must hear of it, whatever it was
        logger.critical("this machine can take part no longer", exc_info=True)
        ended(error)
    else:
        ended(None)


def _serve_engine(config: Config, replica: int) -> str | None:
    """Why the engine has ended; None if it should."""
    address, node = engine_address(config, replica), config.parallel.node_rank
    logger.info("machine %d: joining %s:%d", node, *address)
    control = join(address, cluster_key(config), {"node": node}, timeout_s=_AGENT_SECONDS)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; else answers are sent to a lost one for long
        milliseconds = int(_UNNOTICED_SECONDS * 1000)
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    channel = Channel(control, plain_loads)
    logger.info("machine %d: joined", node)
    children: dict[int, Child] = {}  # by their tickets' numbers
    try:
        while True:
            for message in channel.receive_all(wait=True, timeout_s=_LOOK_SECONDS):
                match message:
                    case Call():
                        channel.send(Present(common_settings(config)))
                    case StartWorker(ticket, gpu):
                        logger.info("machine %d: starting worker %d", node, ticket.rank)
                        own = ticket._replace(key=cluster_key(config))
                        children[ticket.number] = _start(own, gpu)
                    case EndWorkers():
                        _end(children)
                    case Refused(why):
                        raise ConfigError(why)
                    case Done(error):
                        return error and f"the engine on machine 0 has ended: {error}"
            for number in [number for number, child in children.items() if not child.is_alive]:
                child = children.pop(number)
                child.channel.close()
                channel.send(WorkerEnded(number, ending(child.exit_code)))
    except EOFError:
        return "machine 0 is gone, or the network to it"
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


def _end(children: dict[int, Child]) -> None:
    for child in children.values():
        child.kill()
    children.clear()
