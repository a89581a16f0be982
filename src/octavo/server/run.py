"""Binding the port, serving, and ending well."""

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
from fastapi import FastAPI

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.engine.client import EngineClient
from octavo.server.serving import Serving

logger = logging.getLogger(__name__)

# After the running requests were aborted, their last chunks get this long to leave.
_FLUSH_SECONDS = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(config: ServerConfig) -> socket.socket:
    """The server's socket, bound but not listening yet: clients are refused until `serve`.

    Called before weights are loaded, so that a port in use is noticed at once. Raises ConfigError.
    """
    host, port = config.host, config.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--host {host!r} is not an address of this machine ({error}); use 127.0.0.1, or "
            "0.0.0.0 for all addresses"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Lets a restart take the port over from connections that linger, not from a live server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host}:{port} ({error.strerror}); choose another --port (0 takes a "
            "free one) or --host, or stop the program that has it"
        ) from None
    return listener


async def serve(
    make_app: Callable[[], FastAPI],
    engine: EngineClient,
    config: ServerConfig,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    """Start the engine, serve until a signal, and shut both down. Belongs to the main thread.

    The first SIGTERM or SIGINT lets running requests go on for `shutdown_timeout` seconds and then
    aborts them; another one aborts them at once. `make_app` is called when the engine has started,
    `on_ready` with the URL when clients can connect. Raises ConfigError.
    """
    signals = _Signals()
    try:
        with signals.caught():
            if not await signals.unless_caught(engine.start()):
                return
            try:
                server = _Server(make_app(), config, on_ready)
                signals.actions = [server.drain, server.abort]
                if not signals.are_caught:
                    await server.serve([listener])
            finally:
                await engine.shutdown()
    finally:
        listener.close()


class _Signals:
    """SIGINT and SIGTERM: the first one runs the first action, later ones the second."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []
        self._is_first = True
        self._caught = asyncio.Event()

    @property
    def are_caught(self) -> bool:
        return self._caught.is_set()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While inside, signals don't end the process."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number.name)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def unless_caught(self, starting: Coroutine[Any, Any, None]) -> bool:
        """Wait for `starting`; False if a signal came before its end, which cancels it."""
        task = asyncio.create_task(starting)
        caught = asyncio.create_task(self._caught.wait())
        await asyncio.wait({task, caught}, return_when=asyncio.FIRST_COMPLETED)
        caught.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return False
        await task
        return True

    def _on_signal(self, name: str) -> None:
        logger.info("%s received", name)
        self._caught.set()
        if self.actions:
            self.actions[0 if self._is_first else 1]()
        self._is_first = False


class _Server(uvicorn.Server):
    """uvicorn, with a shutdown that ends requests instead of cutting them off."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=config.access_log,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + _FLUSH_SECONDS,
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
        asyncio.get_running_loop().call_later(self._shutdown_timeout, self._serving.abort_all)

    def abort(self) -> None:
        """End now."""
        logger.info("aborting the running requests")
        self._serving.abort_all()
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._force_exit)

    def _force_exit(self) -> None:
        self.force_exit = True

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


def _url(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
