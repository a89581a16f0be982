"""Which machine this is, and where others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """The same for processes that see each other in /proc, and for no others; "" where there is no
    such thing.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Containers on one machine may each have process ids of their own.
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def own_address() -> str:
    """The address from which this machine would reach others; 127.0.0.1 if it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            end.connect(("192.0.2.1", 9))  # sends nothing; of a network that nobody has (RFC 5737)
        except OSError:
            return "127.0.0.1"
        address: str = end.getsockname()[0]
        return address


def listening_socket(address: str) -> socket.socket:
    """On any free port of this address."""
    return socket.create_server((address, 0))
