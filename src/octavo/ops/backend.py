"""What a backend offers besides ops: memory, transfers, and running a recorded function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.ops.array import Array
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.op import Choice

F = TypeVar("F", bound=Callable[..., object])

Role = Literal["table", "matrix", "vector"]
"""What ops do with a weight: gather its rows, multiply by it, or use it element by element."""


class Backend(Protocol):
    """One way to run models. Arrays of different backends never mix."""

    name: str
    device: str

    def describe(self) -> str:
        """The machine's part in one line: device, threads or card, instruction set."""
        ...

    def resolve_dtype(self, asked: str, checkpoint_dtype: str) -> tuple[str, str]:
        """The dtype to compute in ("float32", "bfloat16", "float16") and the reason.

        asked: the --dtype flag, "auto" included. Raises ConfigError if the device can't.
        """
        ...

    def choose(self, dtype: str, asked: Mapping[str, str]) -> tuple[Choice, ...]:
        """Decide which implementation of each op runs for models that compute in `dtype`; ops can
        be called from then on. asked: op name to implementation name.

        Raises ConfigError for a name that is unknown or can't run, and for a choice other than the
        one that a model of the same device and dtype made before in this process.
        """
        ...

    def free_memory_bytes(self) -> int:
        """Bytes that the device could still give this process."""
        ...

    def load_weight(
        self, array: np.ndarray, roles: Sequence[Role], dtype: str
    ) -> tuple[Array, ...]:
        """The weight on the device in `dtype`, once for each role (tied weights have several) in
        the layout that suits it; roles whose layouts agree share one array.
        """
        ...

    def from_host(self, array: np.ndarray) -> Array:
        """A copy on the device (zero-copy where that is safe)."""
        ...

    def to_host(self, array: Array) -> np.ndarray:
        """A copy in host memory. Conformance tests see by it what ops return."""
        ...

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[tuple[int, int]],
        kv_format: KVFormat,
    ) -> tuple[KVLayer, ...]:
        """Zeroed caches for `layers` of (G, E). Raises ConfigError if the memory isn't there."""
        ...

    def batch_context(self, host: HostBatch, kv_layers: tuple[KVLayer, ...]) -> BatchContext: ...

    def compile(self, function: F) -> F:
        """A faster form of a function of ops: identity, a captured graph, or a recorded tape."""
        ...


def load_backend(name: str, *, device: str = "auto") -> Backend:
    """Import a backend and find its device. Raises ConfigError if there is none."""
    if name == "torch":
        from octavo.ops.torch.backend import TorchBackend

        return TorchBackend(device=device)
    raise ConfigError(f"unknown backend {name!r}; backends: torch")
