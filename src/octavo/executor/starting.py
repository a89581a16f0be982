"""Starting the workers of one engine: how many, on which machines, by whom."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from octavo import machine
from octavo.config import Config, knobs
from octavo.core.errors import ConfigError
from octavo.executor.local_workers import launch_here
from octavo.executor.messages import Place, Setup, places
from octavo.executor.nodes import NodeLauncher
from octavo.executor.seats import Seat, check_machines, seats
from octavo.executor.workers import WorkerProcess, Workers
from octavo.weights import Checkpoint


class Launcher(Protocol):
    """Starts workers, and again when they are lost."""

    def launch(self, places: Sequence[Place], gpus: Sequence[str | None]) -> list[WorkerProcess]:
        """Raises ConfigError; then none is left."""
        ...

    def close(self, error: str | None = None) -> None:
        """error: why there will be no workers any more; None: they aren't needed."""
        ...


class _Here:
    """A Launcher on this machine."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def launch(self, places: Sequence[Place], gpus: Sequence[str | None]) -> list[WorkerProcess]:
        return launch_here(places, gpus, timeout_s=self._timeout_s)

    def close(self, error: str | None = None) -> None:
        pass


def worker_starter(
    config: Config, vocab_size: int, checkpoint: Checkpoint, replica: int
) -> tuple[Callable[[], Workers], Launcher]:
    """What starts all workers of an engine, and what must be closed at last. replica: which of the
    engines that are alike. Raises ConfigError.
    """
    parallel = config.parallel
    check_machines(parallel)
    if parallel.node_rank > 0:
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: this runs on machine 0 alone; the others take part "
            "with `octavo serve`"
        )
    if parallel.distributed_executor_backend == "ray":
        return _on_ray(config, vocab_size, replica)
    taken = seats(parallel, replica)
    all_places = places(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    launcher = _launcher(config, replica, taken)
    plain = _without_secrets(config)
    is_here = parallel.nnodes == 1
    own_on = Counter(seat.node for seat in taken)

    def start() -> Workers:
        key = secrets.token_bytes()
        setups = [
            Setup(
                plain,
                vocab_size,
                place,
                key,
                seat.local_rank,
                seat.num_local,
                1.0 if is_here else own_on[seat.node] / seat.num_local,
                host="127.0.0.1" if is_here else parallel.master_addr,
                checkpoint=checkpoint if seat.node == 0 else None,
            )
            for place, seat in zip(all_places, taken, strict=True)
        ]
        launch = partial(launcher.launch, gpus=_gpus(config, taken))
        return Workers(launch, setups, timeout_s=parallel.worker_timeout)

    return start, launcher


def _on_ray(
    config: Config, vocab_size: int, replica: int
) -> tuple[Callable[[], Workers], Launcher]:
    """Ray finds the machines, each time anew. Raises ConfigError."""
    parallel = config.parallel
    if parallel.nnodes > 1:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} does not go with --distributed-executor-backend ray, "
            "which knows the machines; leave one of the two out"
        )
    try:
        from octavo.executor.ray_workers import RayLauncher
    except ImportError as error:
        raise ConfigError(
            f"--distributed-executor-backend ray: Ray is not installed here ({error}); "
            "pip install 'octavo[ray]'"
        ) from None
    launcher = RayLauncher(config, replica)
    all_places = places(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    plain = _without_secrets(config)

    def start() -> Workers:
        taken = launcher.place()
        key = secrets.token_bytes()
        setups = [
            Setup(plain, vocab_size, place, key, *seat)
            for place, seat in zip(all_places, taken, strict=True)
        ]
        launch = partial(launcher.launch, gpus=[None] * len(setups))
        return Workers(launch, setups, timeout_s=parallel.worker_timeout)

    return start, launcher


def _launcher(config: Config, replica: int, taken: Sequence[Seat]) -> Launcher:
    parallel = config.parallel
    if any(seat.node for seat in taken):
        return NodeLauncher(config, replica, [seat.node for seat in taken])
    return _Here(parallel.worker_timeout)


def _gpus(config: Config, taken: Sequence[Seat]) -> list[str | None]:
    """The one that each worker sees, where there are some."""
    if config.backend.device == "cpu" or config.backend.backend == "native":
        return [None] * len(taken)
    visible = machine.visible_gpus()
    if not visible:
        return [None] * len(taken)
    return [visible[seat.local_rank % len(visible)] for seat in taken]


def _without_secrets(config: Config) -> dict[str, object]:
    """The settings that workers need; secrets stay where they are."""
    secret = {knob.name for knob in knobs() if knob.secret}
    return {name: value for name, value in config.to_flat().items() if name not in secret}
