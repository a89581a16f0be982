"""Binding the port."""

from __future__ import annotations

import socket

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError


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
