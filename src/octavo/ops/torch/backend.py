"""The torch backend: the readable reference on CPUs, and the way to GPUs."""

from __future__ import annotations

import functools
import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar, cast

import numpy as np
import torch

from octavo import machine
from octavo.core.dtypes import BYTES_PER_VALUE, DTYPE_ALIASES
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops import Array
from octavo.ops.backend import GroupOffer, KVShape, WeightFormats, WeightRequest, cpu_threads
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.op import Choice, Target, choose_all
from octavo.ops.torch import (  # noqa: F401  (importing registers the implementations)
    activations,
    attention,
    collectives,
    elementwise,
    embedding,
    experts,
    linear,
    norms,
    rotary,
    rows,
    sampling,
)
from octavo.ops.torch.batch import TorchBatchContext, TorchKVLayer, TorchLatentLayer
from octavo.ops.torch.dtypes import to_array, to_tensor, torch_dtype
from octavo.ops.torch.group import TorchGroup, join
from octavo.ops.torch.weights import TorchWeightPlan
from octavo.parallel.host import listening_socket

logger = logging.getLogger("octavo")

F = TypeVar("F", bound=Callable[..., object])


class TorchBackend:
    """`Backend` on torch. device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".
    threads: on CPUs; None takes torch's own number, at most the CPUs that the process may use.

    Sets torch's thread count and rounds denormals to zero, both for the whole process. Raises
    ConfigError for a device that isn't there, and for more threads than CPUs.
    """

    name = "torch"

    def __init__(self, *, device: str = "auto", threads: int | None = None) -> None:
        self._device = _find_device(device)
        self.device = str(self._device)
        # Worker threads take the setting over from the thread that starts them, so this comes
        # before any parallel work.
        torch.set_flush_denormal(True)
        usable = cpu_threads(threads)
        self._listening: socket.socket | None = None  # of an offer, for those who will join
        torch.set_num_threads(min(torch.get_num_threads(), usable) if threads is None else usable)

    def describe(self) -> str:
        version = f"torch {torch.__version__}"
        if self._device.type == "cuda":
            return f"{version}, {torch.cuda.get_device_name(self._device)}"
        threads = torch.get_num_threads()
        isa = torch.backends.cpu.get_cpu_capability()
        return f"{version}, CPU, {threads} threads, {isa}, denormals flushed to zero"

    def resolve_dtype(self, asked: str, checkpoint_dtype: str) -> tuple[str, str]:
        asked = DTYPE_ALIASES.get(asked, asked)
        if asked != "auto":
            if asked not in BYTES_PER_VALUE:
                allowed = ", ".join(("auto", *BYTES_PER_VALUE, *DTYPE_ALIASES))
                raise ConfigError(f"--dtype {asked!r} is unknown; use one of: {allowed}")
            reason = "asked for"
            if asked == "float16" and checkpoint_dtype == "bfloat16":
                reason = "asked for; the checkpoint is bfloat16 and may overflow in float16"
                logger.warning("dtype float16 was %s", reason)
            self._check_dtype(asked)
            return asked, reason
        if self._device.type == "cpu":
            return "float32", "matrix products in half precision are slower on CPUs with torch"
        if checkpoint_dtype not in BYTES_PER_VALUE:
            return "bfloat16", f"the checkpoint's {checkpoint_dtype} isn't a type to compute in"
        if checkpoint_dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
            return "float32", "the checkpoint is bfloat16, which this GPU doesn't have"
        return checkpoint_dtype, "the checkpoint's"

    def _check_dtype(self, dtype: str) -> None:
        on_gpu = self._device.type == "cuda"
        if dtype == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported():
            name = torch.cuda.get_device_name(self._device)
            raise ConfigError(f"--dtype bfloat16: {name} can't; use float16 or float32")

    def choose(self, dtype: str, asked: Mapping[str, str]) -> tuple[Choice, ...]:
        return choose_all(self.name, Target(self._device.type, dtype), asked, _target_of)

    def free_memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return machine.free_memory_bytes()

    def plan_weights(
        self,
        requests: Sequence[WeightRequest],
        *,
        dtype: str,
        quantization: str | None = None,
        source: str | None = None,
    ) -> TorchWeightPlan:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization}: the torch backend doesn't quantize; the native "
                "one does, on CPUs (--backend native)"
            )
        return TorchWeightPlan(requests, dtype, self._device)

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        """On the CPU the result shares a writable array's memory."""
        return to_tensor(array).to(self._device)

    def to_host(self, array: Array) -> np.ndarray:
        return to_array(cast(torch.Tensor, array))

    def resolve_kv_dtype(self, asked: str, dtype: str, weights: WeightFormats) -> tuple[str, str]:
        if asked not in ("auto", dtype):
            raise ConfigError(
                f"--kv-cache-dtype {asked}: the torch backend keeps the cache in the model's "
                f"dtype, here {dtype}; leave it out, or use the native one, which has others for "
                "the families of `octavo models`, on CPUs (--backend native)"
            )
        return dtype, "the model's" if asked == "auto" else "asked for"

    def kv_block_bytes(
        self, block_size: int, layers: Sequence[KVShape], kv_format: KVFormat
    ) -> int:
        return block_size * sum(map(kv_format.token_bytes, layers))

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[KVShape],
        kv_format: KVFormat,
        factors: Sequence[tuple[float, float]] | None = None,
    ) -> tuple[KVLayer, ...]:
        item = torch_dtype(kv_format.dtype)
        needed = num_blocks * self.kv_block_bytes(block_size, layers, kv_format)
        free = self.free_memory_bytes()
        if needed > free:
            raise ConfigError(
                f"the KV cache of {num_blocks} blocks needs {needed / 2**30:.2f} GiB, but only"
                f" {free / 2**30:.2f} GiB are free; lower --kv-cache-memory-bytes"
            )

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            if self._device.type != "cpu":
                return torch.zeros(shape, dtype=item, device=self._device)
            # numpy takes zeroed pages from the system, which come into being as they are written;
            # torch would write them all now: 5 s for 13 GiB.
            num_bytes = math.prod(shape) * item.itemsize
            return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(item).view(shape)

        def layer(shape: KVShape) -> KVLayer:
            if isinstance(shape, LatentShape):
                return TorchLatentLayer(zeros((num_blocks, block_size, sum(shape))))
            whole = (num_blocks, block_size, *shape)
            return TorchKVLayer(zeros(whole), zeros(whole))

        return tuple(map(layer, layers))

    def batch_context(self, host: HostBatch, kv_layers: tuple[KVLayer, ...]) -> BatchContext:
        return TorchBatchContext(
            host=host,
            token_ids=self.from_host(host.token_ids),
            positions=self.from_host(host.positions),
            kv_layers=kv_layers,
            kv_slots=self.from_host(host.kv_slots),
        )

    def offer_group(self, rank: int, size: int, address: str) -> GroupOffer:
        offer: GroupOffer = {"address": address}
        if rank == 0:
            self._listening = listening_socket(address)
            offer["port"] = self._listening.getsockname()[1]
        return offer

    def join_group(self, rank: int, size: int, offers: Sequence[GroupOffer]) -> TorchGroup:
        listening, self._listening = self._listening if rank == 0 else None, None
        with listening or nullcontext():
            return join(rank, size, offers, self._device, listening)

    def compile(self, function: F) -> F:
        """`function` under inference mode, on whatever thread it is called."""

        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            torch.set_flush_denormal(True)  # of the calling thread, and of workers it starts
            with torch.inference_mode():
                return function(*args, **kwargs)

        return cast(F, run)


def _target_of(tensor: torch.Tensor) -> Target:
    return Target(tensor.device.type, str(tensor.dtype).removeprefix("torch."))


def _find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} isn't supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch finds no NVIDIA GPU here; use --device cpu")
    return device
