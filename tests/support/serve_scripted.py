"""A scripted server in a process of its own: `python -m support.serve_scripted SHUTDOWN_TIMEOUT`.

It prints its URL when it is ready; its engine takes SLOW_START seconds to start, a step
STEP_SECONDS.
"""

from __future__ import annotations

import asyncio
import os
import sys

from octavo.config import ServerConfig
from octavo.core.clock import monotonic
from octavo.engine.inprocess import InProcessEngine
from octavo.server.app import create_app
from octavo.server.listener import bind
from octavo.server.run import serve
from support.scripted import ScriptedExecutor, always, byte_model, scripted_engine


async def main() -> None:
    config = ServerConfig(port=0, shutdown_timeout=float(sys.argv[1]))
    listener = bind(config)
    model = byte_model()
    seconds = float(os.environ.get("STEP_SECONDS", "0.005"))
    engine = scripted_engine(ScriptedExecutor(always([97]), step_seconds=seconds), model)
    delay = float(os.environ.get("SLOW_START", "0"))
    if delay:
        engine.start = starting_slowly(engine, delay)  # type: ignore[method-assign]
    await serve(
        lambda: create_app(model, engine, config, monotonic),
        engine,
        config,
        listener,
        lambda url: print(url, flush=True),
    )


def starting_slowly(engine: InProcessEngine, seconds: float):  # type: ignore[no-untyped-def]
    start = engine.start

    async def slowly() -> None:
        print("starting", flush=True)
        await asyncio.sleep(seconds)
        await start()

    return slowly


if __name__ == "__main__":
    asyncio.run(main())
