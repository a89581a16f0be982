"""Ranks that exchange tensors through torch.distributed: gloo between CPUs, NCCL between GPUs.

Nothing of this is torch.distributed's default group, which a process can have only once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from octavo.core.errors import ConfigError
from octavo.ops.backend import GroupOffer

distributed: Any = torch.distributed  # whose type stubs lack half of what is used here

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=5)
"""Of joining, and of one exchange. Ranks that die are noticed sooner by those who started them."""


@dataclass(slots=True)
class TorchGroup:
    """process_group: gloo's or NCCL's. seconds: see `Group`; of NCCL, which works by itself, until
    it has begun.
    """

    rank: int
    size: int
    process_group: Any
    seconds: float = 0.0

    @property
    def sums_itself(self) -> bool:
        """NCCL's sum of an element is made once and copied. So is gloo's, but which ranks it begins
        with depends on where in the message the element is: on the batch.
        """
        return str(self.process_group.name()) == "nccl"

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank brings; tensors of one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        begin = time.perf_counter()
        self.process_group.allgather([parts], [x]).wait()
        self.seconds += time.perf_counter() - begin
        return parts

    def gather_bytes(self, mine: np.ndarray, parts: np.ndarray) -> None:
        """mine (bytes,) uint8; parts (ranks, bytes), written."""
        output = [torch.from_numpy(part) for part in parts]
        self.process_group.allgather([output], [torch.from_numpy(mine)]).wait()


def join(
    rank: int,
    size: int,
    offers: Sequence[GroupOffer],
    device: torch.device,
    listening: socket.socket | None,
    timeout: timedelta = TIMEOUT,
) -> TorchGroup:
    """The group of all ranks, which meet at rank 0's address and port. listening: of rank 0, the
    socket there, which it takes. Raises ConfigError if they don't meet in time.
    """
    address, port = str(offers[0]["address"]), int(offers[0]["port"])
    try:
        if listening is None:
            store = distributed.TCPStore(address, port, size, timeout=timeout)
        else:
            store = distributed.TCPStore(
                address,
                port,
                size,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        group = _process_group(store, rank, size, str(offers[rank]["address"]), device, timeout)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"tensor-parallel rank {rank} of {size} finds no way to the others over {address}:"
            f"{port} ({str(error).splitlines()[0]}); see that the machines reach each other there"
        ) from error
    return TorchGroup(rank, size, group)


def _process_group(
    store: Any,
    rank: int,
    size: int,
    own_address: str,
    device: torch.device,
    timeout: timedelta,
) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = distributed.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    # By itself gloo takes what the machine's name stands for, often 127.0.1.1.
    gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=own_address)]
    return distributed.ProcessGroupGloo(store, rank, size, gloo)
