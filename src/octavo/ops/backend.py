"""What a backend offers besides ops: memory, transfers, and running a recorded function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from octavo.core.errors import ConfigError
from octavo.ops.array import Array
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.op import Choice

F = TypeVar("F", bound=Callable[..., object])


class Backend(Protocol):
    """One way to run models. Arrays of different backends never mix."""

    name: str
    device: str
    choices: tuple[Choice, ...]

    def describe(self) -> str:
        """The machine's part in one line: device, threads or card, instruction set."""
        ...

    def resolve_dtype(self, asked: str, checkpoint_dtype: str) -> tuple[str, str]:
        """The dtype to compute in ("float32", "bfloat16", "float16") and the reason.

        asked: the --dtype flag, "auto" included. Raises ConfigError if the device can't.
        """
        ...

    def free_memory_bytes(self) -> int:
        """Bytes that the device could still give this process."""
        ...

    def from_host(self, array: np.ndarray, dtype: str | None = None) -> Array:
        """A copy on the device (zero-copy where that is safe), converted to `dtype` if given."""
        ...

    def to_host(self, array: Array) -> np.ndarray: ...

    def allocate_kv(
        self, num_blocks: int, block_size: int, layers: Sequence[tuple[int, int]], dtype: str
    ) -> tuple[KVLayer, ...]:
        """Zeroed caches for `layers` of (G, E). Raises ConfigError if the memory isn't there."""
        ...

    def batch_context(self, host: HostBatch, kv_layers: tuple[KVLayer, ...]) -> BatchContext: ...

    def compile(self, function: F) -> F:
        """A faster form of a function of ops: identity, a captured graph, or a recorded tape."""
        ...


def load_backend(
    name: str, *, device: str = "auto", kernels: dict[str, str] | None = None
) -> Backend:
    """Import a backend and choose its implementations. kernels: op name to implementation name, as
    asked for.
    """
    if name == "torch":
        from octavo.ops.torch.backend import TorchBackend

        return TorchBackend(device=device, kernels=kernels)
    raise ConfigError(f"unknown backend {name!r}; backends: torch")
