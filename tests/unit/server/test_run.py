from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.engine.inprocess import InProcessEngine
from octavo.engine.loop import EngineLoop
from octavo.server import run
from octavo.server.app import create_app
from octavo.server.listener import bind
from octavo.server.run import _url
from support.engines import MortalExecutor
from support.scripted import byte_model
from support.truth import make_scheduler


def test_cfg_01_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} .*--port") as caught:
            bind(ServerConfig(port=port))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "a" * 300, "203.0.113.1"])
def test_cfg_01_bad_host(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(ServerConfig(host=host, port=0))


def test_bound_socket_refuses_until_it_serves() -> None:
    with bind(ServerConfig(port=0)) as listener:
        host, port = listener.getsockname()
        assert _url(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), timeout=1)


def test_url_is_one_that_a_client_can_use() -> None:
    with bind(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert _url(listener).startswith("http://127.0.0.1:")


def test_a_server_whose_engine_dies_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no request is there to notice; for a while it tells clients."""
    monkeypatch.setattr(run, "_DEAD_SECONDS", 1.0)
    config, model = ServerConfig(port=0), byte_model()
    executor = MortalExecutor()
    loop = EngineLoop(make_scheduler(executor.num_blocks)[0], executor, monotonic)
    engine = InProcessEngine(lambda: (loop, None))
    health: list[int] = []

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, verify=False) as http:
            assert http.request("FROB", "/").status_code == 404  # 400 by parsers other than h11
            health.append(http.get("/health").status_code)
            executor.is_killed = True
            while engine.error is None:
                time.sleep(0.01)
            health.append(http.get("/health").status_code)

    with ThreadPoolExecutor() as clients, pytest.raises(EngineDeadError) as caught:
        asyncio.run(
            run.serve(
                lambda: create_app(model, engine, config, monotonic),
                engine,
                config,
                bind(config),
                lambda url: clients.submit(ask, url),
            )
        )
    assert str(caught.value) == "the engine has died: worker 1 was killed (signal 9)"
    assert health == [200, 503]
    assert executor.is_shut_down
