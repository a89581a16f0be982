"""Several engines with the same model, each in a process of its own (--data-parallel-size); or one
whose process is started again when it dies (--restart-workers).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.assembly import EngineFacts, build_engine, engine_child
from octavo.config import BackendConfig, Config
from octavo.core.errors import ConfigError
from octavo.decisions import Decision
from octavo.logs import log_to_stderr
from octavo.parallel.replica_shares import ReplicaShare, replica_shares
from octavo.weights import Checkpoint

if TYPE_CHECKING:
    from octavo.engine.background import BackgroundEngine
    from octavo.engine.child import EngineChild
    from octavo.engine.loop import EngineLoop
    from octavo.engine.replicas import Combined, Replicas
    from octavo.executor.base import Progress


def replicated_client(
    config: Config,
    checkpoint: Checkpoint,
    vocab_size: int,
    progress: Progress | None,
    children: Sequence[EngineChild],
) -> Replicas:
    """A client of several engines, each built in one of `children`, all at the same time; its
    `facts` are EngineFacts. Raises ConfigError for more than the machine has, and for recorded
    steps, which are one engine's from its start to its end.

    progress: of the first; the others do the same.
    """
    from octavo.engine.process import EngineProcess
    from octavo.engine.replicas import Replicas

    if config.scheduler.record_steps is not None:
        raise ConfigError(
            f"--record-steps records one engine, but --data-parallel-size is {len(children)}; "
            "leave one of them out"
        )
    shares: Sequence[ReplicaShare | None] = [None]  # one alone has the whole machine
    if len(children) > 1:
        on_gpu = _is_for_gpus(config.backend)
        shares = replica_shares(config.parallel, config.backend, on_gpu=on_gpu)
    builds = []
    for number, share in enumerate(shares):
        threads = config.backend.threads if share is None else share.threads
        own = replace(config, backend=replace(config.backend, threads=threads))
        shown = progress if number == 0 else None
        build = partial(build_engine, own, vocab_size, shown, checkpoint, share=share)
        builds.append(partial(_build_in_child, config.server.log_level, share, build))
    engines = []
    for there, child in zip(builds, children, strict=True):
        child.begin(there)
        engines.append(EngineProcess(there, child))
    return Replicas(
        engines,
        partial(_combined, config, shares[0]),
        (lambda number: EngineProcess(builds[number])) if config.parallel.restart_workers else None,
    )


def offline_engine(
    config: Config, checkpoint: Checkpoint, vocab_size: int
) -> tuple[BackgroundEngine, EngineFacts]:
    """Started engines, for a caller that waits. Raises ConfigError."""
    from octavo.engine.background import BackgroundEngine

    with ExitStack() as stack:
        children = [
            stack.enter_context(engine_child(config))
            for _ in range(config.parallel.data_parallel_size)
        ]
        engine = BackgroundEngine(replicated_client(config, checkpoint, vocab_size, None, children))
        stack.pop_all()  # they end with the client
    return engine, engine.facts


def _is_for_gpus(config: BackendConfig) -> bool:
    from octavo.ops.backend import auto_backend

    if config.simulate is not None or config.backend == "native" or config.device == "cpu":
        return False
    return config.device == "cuda" or auto_backend(config.device) == "torch"


def _build_in_child(
    log_level: str, share: ReplicaShare | None, build: Callable[[], tuple[EngineLoop, EngineFacts]]
) -> tuple[EngineLoop, EngineFacts]:
    """In a new process, which has no logging of its own yet, has not looked for GPUs, and has no
    threads that compute.
    """
    log_to_stderr(log_level)
    if share is None:
        return build()
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    if share.cpus and hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, share.cpus)
    return build()


def _combined(config: Config, share: ReplicaShare | None, facts: Sequence[EngineFacts]) -> Combined:
    """Engines were given the same, so what one says of itself holds for all; where they came to
    differ all the same, what the least of them can do is promised.
    """
    from octavo.engine.replicas import Combined
    from octavo.engine.routing import Router

    blocks = [one.num_blocks for one in facts]
    known = blocks if config.cache.caches_prefixes else [0] * len(facts)
    least = min(facts, key=lambda one: one.max_model_len)
    decisions = least.decisions
    if share is not None:
        reason = f"--data-parallel-size; {share.describe()}; what follows is of each"
        decisions = (Decision("engines", str(len(facts)), reason), *decisions)
    together = replace(least, num_blocks=sum(blocks), decisions=decisions)
    return Combined(together, Router(config.cache.block_size, known), blocks)
