"""Which machine this is, and where others reach it."""

from __future__ import annotations

import socket
import subprocess
import sys

from octavo.parallel.host import host_identity, listening_socket


def test_processes_of_one_machine_have_one_identity() -> None:
    command = "from octavo.parallel.host import host_identity; print(host_identity(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", command], check=True, capture_output=True, text=True
    )
    assert done.stdout == host_identity()
    assert host_identity() != ""


def test_a_machine_is_reached_at_its_address() -> None:
    with listening_socket("127.0.0.1") as end:
        socket.create_connection(end.getsockname(), timeout=5).close()
        end.accept()[0].close()
