from __future__ import annotations

import socket

import pytest

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.server.listener import bind
from octavo.server.run import _url


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
