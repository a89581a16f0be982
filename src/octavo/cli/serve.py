"""`octavo serve`: bind, load, serve, end."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import asdict

from fastapi import FastAPI

from octavo import assembly
from octavo.cli.banner import banner
from octavo.cli.progress import LoadingBar
from octavo.config import Config
from octavo.core.clock import monotonic
from octavo.logs import log_to_stderr
from octavo.server import run
from octavo.server.app import create_app
from octavo.text.served_model import ServedModel


def serve(config: Config, *, own_process: bool = True) -> None:
    """Serve until a signal ends it. Raises ConfigError if it can't.

    The port is taken first: that it is in use is told before a model is loaded. own_process: of the
    engine; a benchmark compares.
    """
    log_to_stderr(config.server.log_level)
    with run.bind(config.server) as listener:
        # Opened in this process first: what that downloads is there for the engine's process.
        checkpoint = assembly.open_model(config.model)
        text = assembly.load_text(config.model, checkpoint)
        vocab_size = assembly.vocab_size(checkpoint, text)
        engine = assembly.engine_client(config, vocab_size, LoadingBar(), own_process=own_process)

        @functools.cache
        def model() -> ServedModel:
            return assembly.served_model(config.model, checkpoint, text, engine.facts)

        def make_app() -> FastAPI:
            cache_info = {**asdict(config.cache), "num_gpu_blocks": engine.facts.num_blocks}
            return create_app(model(), engine, config.server, monotonic, cache_info=cache_info)

        def show_banner(url: str) -> None:
            decisions = (
                *engine.facts.decisions,
                *assembly.sampling_decisions(model(), config.model),
            )
            needs_key = bool(config.server.api_key)
            has_template = text.chat_template.exists
            print(banner(url, model().name, decisions, has_template, needs_key), flush=True)

        asyncio.run(run.serve(make_app, engine, config.server, listener, show_banner))
