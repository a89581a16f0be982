"""Workers on a Ray cluster: Ray says where there is room and starts processes there; what these say
goes over Octavo's own connections, as from other machines. The engine's process is Ray's driver.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.executor.messages import Place
from octavo.executor.remote_workers import Gate, Ticket, join_and_work
from octavo.executor.workers import WorkerProcess

logger = logging.getLogger("octavo")

_PLACE_SECONDS = 60.0
_START_SECONDS = 60.0
"""That a process may take to have imported this module."""

Resources = Mapping[str, float]


class Node(NamedTuple):
    """A machine of the cluster. resources: all that it has, in use or not."""

    address: str
    resources: Resources


def bundle(config: Config) -> dict[str, float]:
    """What one pipeline stage takes. Tensor ranks exchange data twice a layer, so those of a stage
    share a machine: a bundle is never divided.
    """
    parallel, backend = config.parallel, config.backend
    size = parallel.tensor_parallel_size
    if backend.device == "cuda":
        return {"CPU": size, "GPU": size}
    return {"CPU": size * (backend.threads or 1)}


def local_seats(node_of_stage: Sequence[str], tensor_size: int) -> list[tuple[int, int]]:
    """(which of the workers of its machine each is, how many there are), by rank."""
    nodes = [node for node in node_of_stage for _ in range(tensor_size)]
    return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]


def no_room(
    wanted: Resources, num_bundles: int, nodes: Sequence[Node], free: Resources, seconds: float
) -> str:
    """Why there is no placement: what is asked for, what there is, what helps."""
    have = "; ".join(f"{node.address} has {_amounts(node.resources)}" for node in nodes)
    fits_somewhere = any(
        all(node.resources.get(name, 0) >= amount for name, amount in wanted.items())
        for node in nodes
    )
    remedy = (
        "free some, or add nodes"
        if fits_somewhere
        else "no node is large enough for a stage: use a smaller --tensor-parallel-size (with a "
        "larger --pipeline-parallel-size) or --threads"
    )
    stages = "one place" if num_bundles == 1 else f"{num_bundles} places, one for each stage,"
    return (
        f"Ray found no {stages} with {_amounts(wanted)} within {seconds:g} s. The cluster: "
        f"{have or 'no nodes'}; {_amounts(free)} are free. {remedy[0].upper()}{remedy[1:]}"
    )


def _amounts(resources: Resources) -> str:
    names = ("CPU", *(["GPU"] if "GPU" in resources else []))
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


class RayLauncher:
    """Places and starts the workers of one engine, anew each time."""

    def __init__(self, config: Config, *, place_seconds: float = _PLACE_SECONDS) -> None:
        """Joins the cluster that RAY_ADDRESS names, or the one that this machine is a node of.
        Raises ConfigError if there is none.
        """
        self._bundle = bundle(config)
        self._tensor_size = config.parallel.tensor_parallel_size
        self._num_stages = config.parallel.pipeline_parallel_size
        self._place_seconds = place_seconds
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                with _signals_kept():
                    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
            except ConnectionError:
                raise ConfigError(
                    "--distributed-executor-backend ray: there is no Ray cluster here; start one "
                    "with `ray start --head`, join it from the other machines, or name it with "
                    "RAY_ADDRESS"
                ) from None
        # A port that is free now: whoever joins has a key that only Ray passes on.
        key = secrets.token_bytes(32)
        self._gate = Gate(get_node_ip_address(), 0, key, config.parallel.worker_timeout)

    def place(self) -> list[tuple[int, int]]:
        """Find room for all workers, on different machines for different stages as far as there
        are some; what was held before is given back. Returns `local_seats`. Raises ConfigError if
        there is no room in time.
        """
        self._release()
        self._group = placement_group([self._bundle] * self._num_stages, strategy="SPREAD")
        if not self._group.wait(self._place_seconds):
            nodes = [
                Node(node["NodeManagerAddress"], node["Resources"])
                for node in ray.nodes()
                if node["Alive"]
            ]
            free = ray.available_resources()
            self._release()
            raise ConfigError(
                no_room(self._bundle, self._num_stages, nodes, free, self._place_seconds)
            )
        nodes_of = placement_group_table(self._group)["bundles_to_node_id"]
        return local_seats(
            [nodes_of[stage] for stage in range(self._num_stages)], self._tensor_size
        )

    def launch(self, places: Sequence[Place], gpus: Sequence[str | None]) -> list[WorkerProcess]:
        """Where `place` has found room. gpus: not needed, Ray gives each its own. Raises
        ConfigError if one can't be started; then none is left.
        """
        try:
            self._actors = [self._actor(place) for place in places]
            self._wait_started()
            tickets = [self._gate.ticket(place) for place in places]
            for actor, ticket in zip(self._actors, tickets, strict=True):
                actor.work.remote(ticket)
            return [
                self._gate.admit(ticket, place, partial(_kill, actor))
                for actor, ticket, place in zip(self._actors, tickets, places, strict=True)
            ]
        except BaseException:
            self._release()
            raise

    def close(self, error: str | None = None) -> None:
        self._release()
        self._gate.close()
        if self._is_ours:
            ray.shutdown()

    def _actor(self, place: Place) -> Any:
        share = {name: amount / self._tensor_size for name, amount in self._bundle.items()}
        return _WorkerActor.options(
            name=f"octavo-worker-{place.rank}-{secrets.token_hex(4)}",
            num_cpus=share["CPU"],
            num_gpus=share.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place.stage
            ),
        ).remote()

    def _wait_started(self) -> None:
        try:
            ray.get([actor.started.remote() for actor in self._actors], timeout=_START_SECONDS)
        except GetTimeoutError:
            raise ConfigError(
                f"Ray did not start all workers within {_START_SECONDS:g} s; `ray status` and the "
                "logs of its nodes tell more"
            ) from None
        except RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise ConfigError(
                f"Ray can't start workers ({last}); the same Octavo must be installed on all nodes"
            ) from None

    def _release(self) -> None:
        for actor in self._actors:
            _kill(actor)
        self._actors = []
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
            self._group = None


class _Worker:
    """A process that Ray starts for a worker."""

    def started(self) -> None:
        """Answered when the process is there."""

    def work(self, ticket: Ticket) -> None:
        join_and_work(ticket)


_WorkerActor: Any = ray.remote(_Worker)


def _kill(actor: Any) -> None:
    with suppress(RayError, ValueError):  # it is gone, or the cluster is
        ray.kill(actor)


@contextmanager
def _signals_kept() -> Any:
    """Ray would have SIGTERM end this process, which is its parent's to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
