"""Ranks whose tapes exchange rows: through memory that they share on one machine, else through
torch.distributed.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from octavo.core.errors import ConfigError
from octavo.ops.backend import GroupOffer
from octavo.ops.native import _native
from octavo.parallel.host import host_identity, listening_socket

PATIENCE_S = 300.0
"""How long a rank waits for the others. Ranks that die are noticed sooner by those who started
them.
"""


@dataclass(frozen=True, slots=True)
class NativeGroup:
    """collective: what the tape's ops exchange by."""

    rank: int
    size: int
    collective: _native.Collective

    @property
    def seconds(self) -> float:
        return self.collective.seconds


@dataclass(slots=True)
class Offered:
    """What a rank has made for a group, kept until it joins: `offer` tells the others of it."""

    offer: GroupOffer
    memory: _native.GroupMemory | None = None
    listening: socket.socket | None = None


def offer(rank: int, size: int, address: str) -> Offered:
    """Rank 0 makes what all may meet by: memory without a name, which others of this machine open
    by this process and the number of a file, and a socket, for others.
    """
    made = Offered({"host": host_identity(), "address": address})
    if rank > 0:
        return made
    made.listening = listening_socket(address)
    made.offer["port"] = made.listening.getsockname()[1]
    if made.offer["host"]:
        key = secrets.randbits(63)
        made.memory = _native.GroupMemory(size, key)
        made.offer |= {"pid": os.getpid(), "file": made.memory.file, "key": key}
    return made


def join(rank: int, size: int, offers: Sequence[GroupOffer], made: Offered) -> NativeGroup:
    """Raises ConfigError if the ranks can't reach each other."""
    with made.listening or nullcontext():
        if "key" in offers[0] and len({one["host"] for one in offers}) == 1:
            memory = made.memory or _open(rank, size, offers[0])
            return NativeGroup(rank, size, _native.SharedGroup(memory, rank, PATIENCE_S))
        return NativeGroup(rank, size, _through_torch(rank, size, offers, made.listening))


def _open(rank: int, size: int, offered: GroupOffer) -> _native.GroupMemory:
    """Rank 0's memory."""
    path = f"/proc/{offered['pid']}/fd/{offered['file']}"
    try:
        return _native.GroupMemory.open(path, size, int(offered["key"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tensor-parallel rank {rank} can't use rank 0's memory ({error}); run all ranks as "
            "one user, and start them together"
        ) from error


def _through_torch(
    rank: int, size: int, offers: Sequence[GroupOffer], listening: socket.socket | None
) -> _native.Collective:
    try:
        import octavo.ops.torch.group as torch_group
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "tensor-parallel ranks that share no memory, as on several machines, need torch to "
            "reach each other: pip install 'octavo[torch]' on all of them"
        ) from None
    group = torch_group.join(rank, size, offers, torch_group.CPU, listening)

    def exchange(mine: np.ndarray, all_parts: np.ndarray) -> None:
        """mine (bytes,) uint8; all_parts (ranks, bytes), written."""
        group.gather_bytes(mine, all_parts)

    return _native.CalledGroup(rank, size, exchange)
