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


def listening_socket(address: str) -> socket.socket:
    """On any free port of this address."""
    return socket.create_server((address, 0))
