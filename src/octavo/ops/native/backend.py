"""Models in C++ on CPUs."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from octavo import machine
from octavo.core.dtypes import BYTES_PER_VALUE, DTYPE_ALIASES
from octavo.core.errors import ConfigError, InvariantError
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops.array import Array
from octavo.ops.backend import GroupOffer, KVShape, WeightFormats, WeightRequest, cpu_threads
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.native import (  # noqa: F401  (importing registers the implementations)
    _native,
    group,
    ops,
    sampling,
)
from octavo.ops.native.array import NativeArray
from octavo.ops.native.batch import NativeKVLayer, NativeLatentLayer, batch_context
from octavo.ops.native.kernel_times import op_seconds
from octavo.ops.native.recorder import Recorded
from octavo.ops.native.runtime import Runtime
from octavo.ops.native.weights import NativeWeightPlan
from octavo.ops.op import Choice, Op, Target, choose_all

F = TypeVar("F", bound=Callable[..., object])
logger = logging.getLogger("octavo")

_TARGET = Target("cpu", "float32")
"""Activations are float32, whatever the weights are."""

_KV_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8": 3, "int4": 4}
"""KVFormat in csrc/formats.h."""

_LATENT_FORMATS = ("float32", "bfloat16", "int8", "fp8")
"""Those of latent vectors."""


def _formats(kv_format: KVFormat) -> tuple[int, int]:
    """Of keys and of values."""
    return _KV_FORMATS[kv_format.keys], _KV_FORMATS[kv_format.values]


def _latent_format(kv_format: KVFormat) -> int:
    """Raises ConfigError for formats that latent vectors lack."""
    if kv_format.dtype not in _LATENT_FORMATS:
        raise ConfigError(
            f"--kv-cache-dtype {kv_format.dtype}: this model caches one latent vector for the keys "
            f"and values of all heads, in one of: {', '.join(('auto', *_LATENT_FORMATS))}"
        )
    return _KV_FORMATS[kv_format.dtype]


class NativeBackend:
    """Tapes of C++ kernels on a pool of threads of its own.

    threads: that compute; None is all CPUs that this process may use. Raises ConfigError for more
    than there are.
    """

    name = "native"
    device = "cpu"

    def __init__(self, *, threads: int | None = None) -> None:
        self.runtime = Runtime(cpu_threads(threads))
        self._offered: group.Offered | None = None
        self._isas = [name for name, problem in ops.ISAS.items() if not problem][-1:]

    def describe(self) -> str:
        """Instruction sets: those of most kernels first."""
        isas, threads = " and ".join(self._isas), self.runtime.pool.threads
        return f"native kernels, {isas}, {threads} threads, {platform.machine()}"

    def resolve_dtype(self, asked: str, checkpoint_dtype: str) -> tuple[str, str]:
        asked = DTYPE_ALIASES.get(asked, asked)
        if asked == "auto":
            return "stored", "as the checkpoint has them"
        if asked not in BYTES_PER_VALUE:
            allowed = ", ".join(("auto", *BYTES_PER_VALUE, *DTYPE_ALIASES))
            raise ConfigError(f"--dtype {asked!r} is unknown; use one of: {allowed}")
        reason = "set by --dtype"
        if asked == "float16" and checkpoint_dtype == "bfloat16":
            reason += "; the checkpoint is bfloat16 and may overflow in float16"
            logger.warning("dtype float16 was %s", reason)
        return asked, reason

    def choose(self, dtype: str, asked: Mapping[str, str]) -> tuple[Choice, ...]:
        """dtype: of the weights; activations are float32."""
        seconds = op_seconds()
        choices = choose_all(self.name, _TARGET, asked, lambda _: _TARGET, seconds)
        isa_by_op = {choice.op: choice.implementation.name for choice in choices}
        self.runtime.use(isa_by_op)
        if seconds:
            kernels = Counter(isa_by_op[op] for op in seconds)
            self._isas = [isa for isa, _ in kernels.most_common()]
        return choices

    def free_memory_bytes(self) -> int:
        return machine.free_memory_bytes()

    def plan_weights(
        self,
        requests: Sequence[WeightRequest],
        *,
        dtype: str,
        quantization: str | None = None,
        source: str | None = None,
    ) -> NativeWeightPlan:
        return NativeWeightPlan(self.runtime, requests, dtype, quantization, source)

    def from_host(self, array: np.ndarray) -> NativeArray:
        """Shares the memory of a contiguous array."""
        dtype = np.int64 if array.dtype.kind in "iu" else np.float32
        return NativeArray.of(self.runtime, np.ascontiguousarray(array, dtype))

    def to_host(self, array: Array) -> np.ndarray:
        return np.array(cast(NativeArray, array).values)

    def resolve_kv_dtype(self, asked: str, dtype: str, weights: WeightFormats) -> tuple[str, str]:
        if asked == "auto":
            if set(weights.formats) == {"float32"}:
                return "float32", "the weights'"
            return "bfloat16", "half the memory and time of float32, for weights of fewer bits"
        if any(name not in _KV_FORMATS for name in asked.split(",")):
            allowed = ", ".join(("auto", *_KV_FORMATS))
            raise ConfigError(
                f"--kv-cache-dtype {asked}: the native backend lacks it; use one of {allowed}, or "
                "two, for keys and values"
            )
        return asked, "set by --kv-cache-dtype"

    def kv_block_bytes(
        self, block_size: int, layers: Sequence[KVShape], kv_format: KVFormat
    ) -> int:
        return sum(
            _native.latent_block_bytes(_latent_format(kv_format), block_size, *shape)
            if isinstance(shape, LatentShape)
            else _native.kv_block_bytes(*_formats(kv_format), block_size, *shape)
            for shape in layers
        )

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[KVShape],
        kv_format: KVFormat,
        factors: Sequence[tuple[float, float]] | None = None,
    ) -> tuple[KVLayer, ...]:
        needed = num_blocks * self.kv_block_bytes(block_size, layers, kv_format)
        free = self.free_memory_bytes()
        if needed > free:
            raise ConfigError(
                f"the KV cache of {num_blocks} blocks needs {needed / 2**30:.2f} GiB, but only"
                f" {free / 2**30:.2f} GiB are free; lower --kv-cache-memory-bytes"
            )
        of_layers = factors or [(1.0, 1.0)] * len(layers)
        return tuple(
            NativeLatentLayer(
                _native.LatentCache(
                    _latent_format(kv_format), num_blocks, block_size, *shape, index / len(layers)
                )
            )
            if isinstance(shape, LatentShape)
            else NativeKVLayer(
                _native.KVCache(
                    *_formats(kv_format),
                    num_blocks,
                    block_size,
                    *shape,
                    index / len(layers),
                    *of_layer,
                )
            )
            for index, (shape, of_layer) in enumerate(zip(layers, of_layers, strict=True))
        )

    def batch_context(self, host: HostBatch, kv_layers: tuple[KVLayer, ...]) -> BatchContext:
        return batch_context(self.runtime, host, kv_layers)

    def offer_group(self, rank: int, size: int, address: str) -> GroupOffer:
        self._offered = group.offer(rank, size, address)
        return self._offered.offer

    def join_group(self, rank: int, size: int, offers: Sequence[GroupOffer]) -> group.NativeGroup:
        if self._offered is None:
            raise InvariantError(f"rank {rank} joins a group to which it has offered nothing")
        offered, self._offered = self._offered, None
        return group.join(rank, size, offers, offered)

    def compile(self, function: F) -> F:
        """A recorded tape; an op by itself is one already."""
        if isinstance(function, Op | ops.TapeOp):
            return function
        return cast(F, Recorded(self.runtime, cast(Callable[..., Any], function)))
