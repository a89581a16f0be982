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
from octavo.core.errors import ConfigError, NoPlaceError
from octavo.executor.messages import Place
from octavo.executor.remote_workers import Gate, Ticket, join_and_work
from octavo.executor.workers import WorkerProcess

logger = logging.getLogger("octavo")

_PLACE_SECONDS = 60.0
_PREFERRED_SECONDS = 5.0
"""To be given places where they are wanted, before any are taken."""
_START_SECONDS = 60.0
"""That a process may take to have imported this module."""

_NODE_LABEL = "ray.io/node-id"

Resources = Mapping[str, float]


class Node(NamedTuple):
    """A machine that Ray calls `key`. resources: all that it has, in use or not."""

    address: str
    resources: Resources
    key: str = ""

    def has_room(self, wanted: Resources) -> bool:
        """If nothing else were there."""
        return all(self.resources.get(name, 0) >= amount for name, amount in wanted.items())


def bundle(config: Config) -> dict[str, float]:
    """What one pipeline stage takes. Tensor ranks exchange data twice a layer, so those of a stage
    share a machine: a bundle is never divided.
    """
    parallel, backend = config.parallel, config.backend
    size = parallel.tensor_parallel_size
    if backend.device == "cuda":
        return {"CPU": size, "GPU": size}
    return {"CPU": size * (backend.threads or 1)}


def preferred_nodes(config: Config, replica: int, nodes: Sequence[Node]) -> list[Node]:
    """Where a replica's stages should be, so that the loss of a machine is that of few replicas:
    all stages of all replicas are dealt out side by side. Empty if it doesn't matter. Each engine
    finds this for itself; nodes: those that have room for a stage, the same for all.
    """
    parallel = config.parallel
    num_stages, total = parallel.pipeline_parallel_size, parallel.data_parallel_size
    if total == 1 or len(nodes) < 2:
        return []
    ordered = sorted(nodes, key=lambda node: node.key)
    stages = range(replica * num_stages, (replica + 1) * num_stages)
    return [ordered[stage * len(ordered) // (total * num_stages)] for stage in stages]


def memory_shares(config: Config, nodes_of: Sequence[str], num_nodes: int) -> list[float]:
    """Of each stage's machine, what this engine's workers there may take of its memory. nodes_of:
    by stage. Other replicas are taken to be spread evenly.
    """
    num_replicas = config.parallel.data_parallel_size
    if num_replicas == 1:
        return [1.0] * len(nodes_of)
    on_each = num_replicas * len(nodes_of) / max(1, num_nodes)
    return [min(1.0, nodes_of.count(node) / on_each) for node in nodes_of]


def local_seats(node_of_stage: Sequence[str], tensor_size: int) -> list[tuple[int, int]]:
    """(which of the workers of its machine each is, how many there are), by rank."""
    nodes = [node for node in node_of_stage for _ in range(tensor_size)]
    return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]


def no_room(
    wanted: Resources, num_bundles: int, nodes: Sequence[Node], free: Resources, seconds: float
) -> str:
    """Why there is no placement: what is asked for, what there is, what helps."""
    have = "; ".join(f"{node.address} has {_amounts(node.resources)}" for node in nodes)
    fits_somewhere = any(node.has_room(wanted) for node in nodes)
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


class RaySeat(NamedTuple):
    """Where a worker is: as of `Setup`."""

    local_rank: int
    num_local: int
    memory_share: float


class RayLauncher:
    """Places and starts the workers of one engine, anew each time."""

    def __init__(
        self, config: Config, replica: int = 0, *, place_seconds: float = _PLACE_SECONDS
    ) -> None:
        """replica: which of --data-parallel-size engines.

        Joins the cluster that RAY_ADDRESS names, or the one that this machine is a node of. Raises
        ConfigError if there is none.
        """
        self._config = config
        self._replica = replica
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

    def place(self) -> list[RaySeat]:
        """Find room for all workers, on different machines for different stages as far as there
        are some, and for different replicas rather than stages; what was held before is given back.
        Returns where they are, by rank. Raises NoPlaceError if there is no room in time.
        """
        self._release()
        suited = [node for node in _nodes() if node.has_room(self._bundle)]
        preferred = preferred_nodes(self._config, self._replica, suited)
        if not preferred or not self._reserve(_PREFERRED_SECONDS, preferred):
            self._release()
            if not self._reserve(self._place_seconds):
                free = ray.available_resources()
                self._release()
                raise NoPlaceError(
                    no_room(self._bundle, self._num_stages, _nodes(), free, self._place_seconds)
                )
        by_stage = placement_group_table(self._group)["bundles_to_node_id"]
        nodes_of = [by_stage[stage] for stage in range(self._num_stages)]
        shares = memory_shares(self._config, nodes_of, len(suited))
        if self._config.parallel.data_parallel_size > 1:
            # When it comes to placing them again, requests must not wait for room here for long:
            # other engines may compute them.
            self._place_seconds = min(self._place_seconds, self._config.parallel.worker_timeout)
        return [
            RaySeat(*seat, shares[rank // self._tensor_size])
            for rank, seat in enumerate(local_seats(nodes_of, self._tensor_size))
        ]

    def _reserve(self, seconds: float, nodes: Sequence[Node] = ()) -> bool:
        """Whether there is room for all stages. nodes: where, if not anywhere."""
        self._group = placement_group(
            [self._bundle] * self._num_stages,
            strategy="SPREAD",
            bundle_label_selector=[{_NODE_LABEL: node.key} for node in nodes] or None,
        )
        return bool(self._group.wait(seconds))

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


def _nodes() -> list[Node]:
    """Those that live."""
    return [
        Node(node["NodeManagerAddress"], node["Resources"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
    ]


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
