"""What a backend offers besides ops: memory, transfers, and running a recorded function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np

from octavo import machine
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops.array import Array
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.collectives import Group
from octavo.ops.op import Choice
from octavo.quantization.grouped import GroupedTensor

F = TypeVar("F", bound=Callable[..., object])

Role = Literal["table", "matrix", "matrices", "head", "router", "vector"]
"""What ops do with a weight: gather its rows, multiply by it (for hidden states; by one of several
matrices in it, one under another; for logits, where small errors show more; or for scores that
decide, so that it is never quantized), or use it element by element.
"""


GroupOffer = dict[str, str | int]
"""What JSON can carry. "address": where this rank is reached from other machines, as far as it
knows; whoever hands the offers on may put a better one in.
"""

KVShape = tuple[int, int] | LatentShape
"""What a layer's cache holds of a token: keys and values (G, E) each, or one latent vector."""


class StoredArray(Protocol):
    """A tensor of a checkpoint, which is read when it is needed, from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """As stored: a numpy or ml_dtypes name ("bfloat16"), or that of a quantized format: a GGUF
        type ("Q4_1"), or another ("GPTQ 4-bit").
        """
        ...

    def read(self, rows: slice) -> np.ndarray:
        """The values of `rows` of the first axis. Quantized ones come as float32."""
        ...

    def read_stored(self, rows: slice) -> np.ndarray:
        """As `read`, but GGUF's quantized types come in their blocks, (rows, bytes of a row) uint8;
        only for tensors of two axes.
        """
        ...

    def grouped(self) -> GroupedTensor | None:
        """The tensor as codes and scales, if that is how it is stored."""
        ...


@dataclass(frozen=True)
class WeightRequest:
    """A weight that a model wants: the values of `parts` plus `offset`.

    parts: stacked along the first axis. shape: after stacking. roles: several for tied weights.
    dtype: what it insists on; None leaves the format to the backend. offset: 0 but for vectors.
    """

    parts: tuple[StoredArray, ...]
    shape: tuple[int, ...]
    roles: tuple[Role, ...]
    dtype: str | None = None
    offset: float = 0.0


class WeightFormats(Protocol):
    """In what the weights of a model will be held."""

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Memory of each weight."""
        ...

    @property
    def formats(self) -> tuple[str, ...]:
        """How each weight will be stored: "float32", "int8", ... Together with the checkpoint they
        determine every value.
        """
        ...


class WeightPlan(WeightFormats, Protocol):
    """How the weights of a model will be held; nothing is read yet."""

    def load(self) -> Iterator[tuple[Array, ...]]:
        """Each weight on the device, in the order of the requests: an array for each of its roles,
        in the layout that suits it; roles whose layouts agree share one array.
        """
        ...


class Backend(Protocol):
    """One way to run models. Arrays of different backends never mix."""

    name: str
    device: str

    def describe(self) -> str:
        """The machine's part in one line: device, threads or card, instruction set."""
        ...

    def resolve_dtype(self, asked: str, checkpoint_dtype: str) -> tuple[str, str]:
        """The dtype of weights and activations ("float32", "bfloat16", "float16") and the reason;
        or "stored": weights stay as the checkpoint has them, and activations are float32.

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

    def plan_weights(
        self,
        requests: Sequence[WeightRequest],
        *,
        dtype: str,
        quantization: str | None = None,
        source: str | None = None,
    ) -> WeightPlan:
        """Decide how to hold these weights.

        dtype: from `resolve_dtype`; for those that don't insist on their own. quantization: "int8"
        or "int4" for matrices and tables, which are quantized as they are loaded. source:
        identifies the content of the files behind the requests; a backend may keep what it made of
        them on disk. Raises ConfigError for a quantization that it can't do.
        """
        ...

    def from_host(self, array: np.ndarray) -> Array:
        """A copy on the device (zero-copy where that is safe)."""
        ...

    def to_host(self, array: Array) -> np.ndarray:
        """A copy in host memory. Conformance tests see by it what ops return."""
        ...

    def resolve_kv_dtype(self, asked: str, dtype: str, weights: WeightFormats) -> tuple[str, str]:
        """How the KV cache stores values, as `KVFormat` names it, and the reason.

        asked: the --kv-cache-dtype flag (`plain_kv_dtype`), "auto" included. dtype: from
        `resolve_dtype`. Raises ConfigError for what the backend lacks.
        """
        ...

    def kv_block_bytes(
        self, block_size: int, layers: Sequence[KVShape], kv_format: KVFormat
    ) -> int:
        """Memory of one block in the caches of all `layers`, padding included."""
        ...

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[KVShape],
        kv_format: KVFormat,
        factors: Sequence[tuple[float, float]] | None = None,
    ) -> tuple[KVLayer, ...]:
        """Zeroed caches for `layers`. factors: of each layer's keys and values where they are fp8:
        what is stored is the value divided by its factor (None: all are 1; latent vectors have
        none). Raises ConfigError if the memory isn't there.
        """
        ...

    def batch_context(self, host: HostBatch, kv_layers: tuple[KVLayer, ...]) -> BatchContext: ...

    def offer_group(self, rank: int, size: int, address: str) -> GroupOffer:
        """What the others must know of this rank to make a group of `size` with it. What it opens
        for them is kept until `join_group`. address: of this machine, where the others reach it.
        """
        ...

    def join_group(self, rank: int, size: int, offers: Sequence[GroupOffer]) -> Group:
        """The group of those who made the offers, in order of ranks; all must join.

        Raises ConfigError if they can't reach each other.
        """
        ...

    def compile(self, function: F) -> F:
        """A faster form of a function of ops: identity, a captured graph, or a recorded tape."""
        ...


def load_backend(name: str, *, device: str = "auto", threads: int | None = None) -> Backend:
    """Import a backend and find its device.

    name: "native", "torch" or "auto", which is torch on a GPU and native on a CPU. threads: that
    compute on a CPU; None is one for each that the process may use. Raises ConfigError if the
    backend or the device isn't there.
    """
    if name == "auto":
        name = auto_backend(device)
        if name == "torch" and device == "auto":
            backend = _load_torch(device, threads)
            if backend.device != "cpu":
                return backend
            name = "native"
    if name == "torch":
        return _load_torch(device, threads)
    if name == "native":
        return _load_native(device, threads)
    raise ConfigError(f"unknown backend {name!r}; use auto, native or torch")


def backend_name(asked: str, only: str | None, family: str) -> str:
    """For `load_backend`. only: the backend that the model needs, if it needs one. Raises
    ConfigError if another was asked for.
    """
    if only is not None and asked not in ("auto", only):
        raise ConfigError(
            f"--backend {asked}: {family} runs on the {only} backend alone; leave it out"
        )
    return only or asked


def cpu_threads(asked: int | None) -> int:
    """Threads that compute on a CPU: as many as asked, or one for each CPU that the process may use
    (affinity, control groups' quotas). Raises ConfigError for more than these.
    """
    usable = machine.usable_cpus()
    if asked is not None and asked > usable:
        raise ConfigError(
            f"--threads {asked} is more than the {usable} CPUs that this process may use "
            "(affinity, containers' limits); threads that share a CPU wait for each other. "
            f"Use {usable} or less"
        )
    return asked or usable


def auto_backend(device: str) -> str:
    """The backend that is likely to run there, found without importing it (torch takes seconds)."""
    if device == "auto":
        has_gpu = any(Path(path).exists() for path in _NVIDIA_DEVICES)
        return "torch" if has_gpu and find_spec("torch") is not None else "native"
    return "native" if device == "cpu" else "torch"


_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux; Linux inside Windows


def _load_native(device: str, threads: int | None) -> Backend:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"--backend native computes on CPUs, not on {device!r}; use torch there")
    from octavo.ops.native.backend import NativeBackend

    return NativeBackend(threads=threads)


def _load_torch(device: str, threads: int | None) -> Backend:
    try:
        from octavo.ops.torch.backend import TorchBackend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("the torch backend needs torch: pip install 'octavo[torch]'") from None
    return TorchBackend(device=device, threads=threads)
