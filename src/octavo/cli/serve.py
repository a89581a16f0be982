"""`octavo serve`: bind, load, serve, end.

The order is what makes it quick: the engine's process is started first and given its work as soon
as that is known; what this process needs only later is imported while the engine is being built.
"""

from __future__ import annotations

import functools
import gc
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from octavo import assembly
from octavo.cli.banner import banner
from octavo.cli.progress import LoadingBar
from octavo.config import Config
from octavo.core.clock import monotonic
from octavo.engine.child import EngineChild
from octavo.logs import log_to_stderr
from octavo.server.listener import bind
from octavo.weights import Checkpoint

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.engine.client import EngineClient
    from octavo.text.served_model import ServedModel

logger = logging.getLogger("octavo")


def serve(config: Config, *, own_process: bool = True) -> None:
    """Serve until a signal ends it, or take part in it on another machine than the first. Raises
    ConfigError if it can't.

    The port is taken first: that it is in use is told before a model is loaded. own_process: of the
    engine; a benchmark compares.
    """
    log_to_stderr(config.server.log_level)
    if config.parallel.node_rank > 0:
        _take_part(config)
        return
    num_engines = config.parallel.data_parallel_size
    with bind(config.server) as listener, ExitStack() as children:
        processes = [
            children.enter_context(assembly.engine_child(config))
            for _ in range(num_engines if own_process else 0)
        ]
        # Opened in this process: what that downloads, and the header, is there for the engine's.
        checkpoint = assembly.open_model(config.model)
        text = assembly.load_text(config.model, checkpoint)
        vocab_size = assembly.vocab_size(checkpoint, text)
        assembly.check_draft_models(config, text, vocab_size)
        engine = _engine(config, checkpoint, vocab_size, processes)

        import asyncio

        from octavo.server import run
        from octavo.server.app import create_app

        @functools.cache
        def model() -> ServedModel:
            return assembly.served_model(config.model, checkpoint, text, engine.facts)

        def make_app() -> Starlette:
            return create_app(
                model(),
                engine,
                config.server,
                monotonic,
                cache_info=assembly.cache_info(config.cache, engine.facts),
                speculation=config.speculation.parsed,
            )

        def on_ready(url: str) -> None:
            # What has been made so far stays: later collections need not look through it.
            gc.freeze()
            gc.enable()
            decisions = (
                *engine.facts.decisions,
                *assembly.sampling_decisions(model(), config.model),
            )
            needs_key = bool(config.server.api_key)
            has_template = text.chat_template.exists
            print(banner(url, model().name, decisions, has_template, needs_key), flush=True)

        asyncio.run(run.serve(make_app, engine, config.server, listener, on_ready))


def _take_part(config: Config) -> None:
    """Compute what machine 0 says, without a port for clients. Raises ConfigError, EngineDeadError;
    SystemExit when a signal ends it.
    """
    from octavo.executor.nodes import run_agent

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    assembly.open_model(config.model)  # what that downloads is there for the workers
    run_agent(config)


def _leave(number: int, frame: object) -> None:
    logger.info("%s received", signal.Signals(number).name)
    raise SystemExit(0)


def _engine(
    config: Config, checkpoint: Checkpoint, vocab_size: int, children: Sequence[EngineChild]
) -> EngineClient:
    """In these processes; in this one if there are none."""
    # What one engine records, another can't go on with.
    starts_again = config.parallel.restart_workers and config.scheduler.record_steps is None
    if len(children) > 1 or (children and starts_again):
        from octavo.replication import replicated_client  # only who has several loads it

        return replicated_client(config, checkpoint, vocab_size, LoadingBar(), children)
    child = children[0] if children else None
    return assembly.engine_client(config, checkpoint, vocab_size, LoadingBar(), child)
