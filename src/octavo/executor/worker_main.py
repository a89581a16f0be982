"""What runs in a worker's own process."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.executor.messages import Ending, Loaded, Offer, Progress, Run, Setup, Sizes
from octavo.logs import log_to_stderr
from octavo.parallel.channel import Channel
from octavo.parallel.lifeline import Lifeline
from octavo.parallel.links import StageFailedError
from octavo.parallel.topology import assign_cpus
from octavo.weights import open_model

if TYPE_CHECKING:
    from octavo.runner.model_runner import ModelRunner
    from octavo.runner.stage_runner import StageRunner

logger = logging.getLogger("octavo")


_LINGER_SECONDS = 5.0


class Begin(NamedTuple):
    """The first message to a child. lifeline: a file descriptor that it has."""

    lifeline: int
    timeout_s: float


def run(end: socket.socket) -> None:
    """In a child of the engine's process."""
    channel = Channel(end)
    with closing(channel), suppress(EOFError):  # the parent is gone
        begin: Begin = channel.receive()
        work(channel, socket.socket(fileno=begin.lifeline), begin.timeout_s)


def work(
    channel: Channel, lifeline: socket.socket, timeout_s: float, *, host: str | None = None
) -> None:
    """Be a worker until the channel ends. host: this machine's address for other workers, if it is
    not that of the executor's. Raises EOFError when the channel ends.
    """
    gc.disable()
    life = Lifeline(lifeline, timeout_s)
    try:
        _work(channel, host)
    except EOFError:
        raise
    except ConfigError as error:
        channel.send(Ending(str(error)))
    except MemoryError:
        logger.critical("out of memory", exc_info=True)
        life.say_last("has run out of memory")
    except Exception as error:  # whoever waits must hear of it, whatever it was
        logger.critical("the worker has failed", exc_info=True)
        # The cause's own text may hold paths or internals and can reach clients.
        life.say_last(f"has failed ({type(error).__name__}); the server's log has the details")
    finally:
        gc.unfreeze()


def _work(channel: Channel, host: str | None) -> None:
    setup: Setup = channel.receive()
    if host is not None:
        setup = setup._replace(host=host)
    config = _pinned(Config.from_flat(setup.settings), setup)
    log_to_stderr(config.server.log_level)
    from octavo.executor.neighbours import meet  # what computes: only now, on its CPUs
    from octavo.executor.worker import Worker, worker_backend
    from octavo.models.registry import engine_model

    checkpoint = setup.checkpoint or open_model(config.model)
    model = engine_model(checkpoint.config)
    backend = worker_backend(config, model)

    def exchange(offer: Offer) -> list[Offer]:
        channel.send(offer)
        offers: list[Offer] = channel.receive()
        return offers

    neighbours, kernels = meet(setup, config, checkpoint, backend, exchange)
    if kernels:
        config = replace(config, backend=replace(config.backend, kernels=dict(kernels)))
    worker = Worker(
        config,
        setup.vocab_size,
        checkpoint,
        model=model,
        backend=backend,
        place=setup.place,
        neighbours=neighbours,
    )
    free_bytes = int(worker.plan.free_memory_bytes * setup.memory_share)
    channel.send(worker.plan._replace(free_memory_bytes=free_bytes))
    sizes: Sizes = channel.receive()
    worker.load(sizes, _progress(channel))
    if setup.place.is_last_stage:
        _sample(channel, worker.runner(sizes), sizes, reports=setup.place.tensor_rank == 0)
    else:
        _compute(channel, worker.stage_runner(sizes))


def _compute(channel: Channel, runner: StageRunner) -> None:
    _be_ready(channel)
    while True:
        message: Run = channel.receive()
        with _others_first():
            runner.execute(message.step, message.outcomes)


def _sample(channel: Channel, runner: ModelRunner, sizes: Sizes, *, reports: bool) -> None:
    rows = sizes.calibrated_rows
    _be_ready(channel, runner.seconds_by_rows(rows) if rows else ())
    while True:
        message: Run = channel.receive()
        with _others_first():
            output = runner.execute(message.step)
        if reports:
            channel.send(output)


@contextmanager
def _others_first() -> Iterator[None]:
    """A worker that stops because another stage failed lets the executor hear of that one first."""
    try:
        yield
    except (EOFError, StageFailedError):
        time.sleep(_LINGER_SECONDS)
        raise


def _be_ready(channel: Channel, seconds_by_rows: Sequence[tuple[int, float]] = ()) -> None:
    channel.send(Loaded(tuple(seconds_by_rows)))
    # What has been made so far stays: looking through it would hold steps up.
    gc.freeze()
    gc.enable()


def _pinned(config: Config, setup: Setup) -> Config:
    """The settings, with this worker's number of threads, on CPUs of their own."""
    assignment = assign_cpus(
        setup.num_local, setup.place.tensor_size, threads=config.backend.threads
    )
    own = assignment.sets[setup.local_rank]
    if hasattr(os, "sched_setaffinity"):  # Linux; of all threads that are started from here on
        os.sched_setaffinity(0, own.cpus)
    return replace(config, backend=replace(config.backend, threads=own.threads))


def _progress(channel: Channel) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        channel.send(Progress(done, total))

    return tell
