"""Serving, and ending well."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.engine.client import EngineClient
from octavo.server.serving import Serving

logger = logging.getLogger(__name__)

# After the running requests were aborted, their last chunks get this long to leave.
_FLUSH_SECONDS = 2
# When nobody read those, connections are cut; then tasks get this long to notice.
_CUT_SECONDS = 1
# With a dead engine the server stays this long, to tell clients and load balancers.
_DEAD_SECONDS = 5
# `timeout` and others signal a process and then its group: that is one signal.
_SAME_SIGNAL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(
    make_app: Callable[[], Starlette],
    engine: EngineClient,
    config: ServerConfig,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    """Start the engine, serve until a signal, and shut both down. Belongs to the main thread.

    The first SIGTERM or SIGINT lets running requests go on for `shutdown_timeout` seconds and then
    aborts them; another one aborts them at once. `make_app` is called when the engine has started,
    `on_ready` with the URL when clients can connect. Raises ConfigError; EngineDeadError when the
    engine has died; SystemExit with the signal's code if one came before the server was ready.
    """
    signals = _Signals()
    try:
        with signals.caught():
            await signals.unless_caught(engine.start())
            try:
                server = _Server(make_app(), config, on_ready)
                signals.actions = [server.drain, server.abort]
                signals.exit_if_caught()
                death = asyncio.create_task(_end_when_dead(server, engine))
                await server.serve([listener])
                death.cancel()
                if engine.error is not None:
                    raise EngineDeadError(f"the engine has died: {engine.error}")
            finally:
                await engine.shutdown()
    finally:
        listener.close()


async def _end_when_dead(server: _Server, engine: EngineClient) -> None:
    await engine.wait_closed()
    logger.critical("the engine has died; the server ends in %d s", _DEAD_SECONDS)
    await asyncio.sleep(_DEAD_SECONDS)
    server.should_exit = True


class _Signals:
    """SIGINT and SIGTERM: the first one runs the first action, later ones the second."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []
        self._last: tuple[signal.Signals, float] | None = None
        self._caught = asyncio.Event()

    def exit_if_caught(self) -> None:
        """Raises SystemExit with the code that the signal would have given the process."""
        if self._last is not None:
            raise SystemExit(128 + self._last[0])

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While inside, signals don't end the process."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def unless_caught(self, starting: Coroutine[Any, Any, None]) -> None:
        """Wait for `starting`; a signal before its end cancels it and exits."""
        task = asyncio.create_task(starting)
        caught = asyncio.create_task(self._caught.wait())
        await asyncio.wait({task, caught}, return_when=asyncio.FIRST_COMPLETED)
        caught.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.exit_if_caught()
        await task

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        last, self._last = self._last, (number, now)
        if last is not None and last[0] == number and now - last[1] < _SAME_SIGNAL_SECONDS:
            return
        logger.info("%s received", number.name)
        self._caught.set()
        if self.actions:
            self.actions[0 if last is None else 1]()


class _Server(uvicorn.Server):
    """uvicorn, with a shutdown that ends requests instead of cutting them off."""

    def __init__(
        self, app: Starlette, config: ServerConfig, on_ready: Callable[[str], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # Not what else may be installed, as with Ray: its errors and its shutdown differ.
                http="h11",
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=config.access_log,
                server_header=False,
                # Only for what ignores that its connection was cut: it is cancelled, with a log.
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout)
                + _FLUSH_SECONDS
                + _CUT_SECONDS,
            )
        )
        # Its news is in the banner already; the access log is asked for explicitly.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self._serving: Serving = app.state.serving
        self._shutdown_timeout = config.shutdown_timeout
        self._on_ready = on_ready

    def drain(self) -> None:
        """Take no more requests, end when the running ones have, abort them after the timeout."""
        logger.info("shutting down in at most %g s", self._shutdown_timeout)
        self.should_exit = True
        self._serving.close()
        asyncio.get_running_loop().call_later(self._shutdown_timeout, self._abort_all)

    def abort(self) -> None:
        """End now."""
        logger.info("aborting the running requests")
        self._abort_all()
        later = asyncio.get_running_loop().call_later
        later(_FLUSH_SECONDS + _CUT_SECONDS, self._force_exit)

    def _abort_all(self) -> None:
        self._serving.abort_all()
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._cut)

    def _cut(self, is_chosen: Callable[[Any], bool] = lambda protocol: True) -> None:
        """Close connections at once: for the application, their clients have left."""
        for protocol in list(self.server_state.connections):
            if is_chosen(protocol):
                protocol.transport.abort()

    def _force_exit(self) -> None:
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._cut(_is_receiving)  # uvicorn would wait for the rest
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handlers end the process by the signal, i.e. not with exit code 0.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        [listener] = sockets or []
        try:
            await super().startup(sockets)
        except OSError as error:  # another process began to listen since `bind`
            raise ConfigError(
                f"can't listen on {_url(listener)} ({error.strerror}); choose another --port"
            ) from None
        self._on_ready(_url(listener))


def _is_receiving(protocol: Any) -> bool:
    """Whether uvicorn's protocol is in the middle of a request's body."""
    cycle = getattr(protocol, "cycle", None)
    return cycle is not None and cycle.more_body and not cycle.response_complete


def _url(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
