"""A model's weights in packed panels: which format each gets, and how they are filled.

The layouts are those of csrc/formats.h, and csrc/pack.cpp fills them. Activations are float32, so
that no format of a weight limits them.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

import octavo
from octavo import machine
from octavo.core.dtypes import QUANTIZATIONS
from octavo.core.errors import InvariantError
from octavo.ops.backend import StoredArray, WeightRequest
from octavo.ops.native import _native
from octavo.ops.native.array import NativeArray
from octavo.ops.native.runtime import Runtime
from octavo.ops.native.weight_cache import WeightCache

logger = logging.getLogger("octavo")

LANES, GROUP = 16, 32
"""Outputs of a panel; weights along a row that share a scale."""

_JOB_BYTES = 1 << 21
"""Of panels that a thread fills at a time: large matrices are shared out, and what is dequantized
for a moment stays small.
"""

_LAYOUT = 3
"""Raised with every change of the bytes that the same checkpoint is packed to."""

_NUMBERS = {"f32": 0, "bf16": 1, "f16": 2, "q8": 3, "q4": 4}  # WeightFormat in csrc/formats.h
_STORED_NUMBERS = {  # StoredType in csrc/pack.h
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "Q8_0": 3,
    "Q4_0": 4,
    "Q4_1": 5,
}
_BLOCKS = ("Q8_0", "Q4_0", "Q4_1")


class Format(NamedTuple):
    """A matrix's format. kind: a name of csrc/formats.h's WeightFormat. group_size: weights along a
    row that get the same scale (and minimum) where they are quantized as they are packed, a
    multiple of 32; None for the whole row. The layout has one for each 32 in any case.
    """

    kind: str
    has_min: bool = False
    group_size: int | None = GROUP

    def __str__(self) -> str:
        name = f"{_NAMES[self.kind]} with minimum" if self.has_min else _NAMES[self.kind]
        if self.group_size == GROUP:
            return name
        if self.group_size is None:
            return f"{name} by channel"
        return f"{name} in groups of {self.group_size}"

    def panel_stride(self, inputs: int) -> int:
        """Bytes from one panel to the next."""
        return _native.panel_bytes(_NUMBERS[self.kind], self.has_min, inputs)


_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "q8": "int8", "q4": "int4"}
_BY_DTYPE = {"float32": Format("f32"), "bfloat16": Format("bf16"), "float16": Format("f16")}
_Q8, _Q4, _Q4_MIN = Format("q8"), Format("q4"), Format("q4", has_min=True)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix (O, I) in panels. data: (bytes,) uint8, 64-byte aligned; lives as long as this."""

    format: Format
    shape: tuple[int, ...]
    data: np.ndarray
    panel_stride: int

    @cached_property
    def matrix(self) -> _native.PackedMatrix:
        """What kernels take; it keeps the data alive."""
        kind, has_min, _ = self.format
        outputs, inputs = self.shape
        return _native.PackedMatrix(
            _NUMBERS[kind], has_min, outputs, inputs, self.data, self.panel_stride
        )

    def reshape(self, *shape: int) -> PackedWeight:
        raise InvariantError(f"a packed matrix of {self.shape} can't be seen as {shape}")


def pack_rows(values: np.ndarray, format: Format = _BY_DTYPE["float32"]) -> PackedWeight:
    """A matrix (O, I) of float32, packed on the calling thread."""
    outputs, inputs = values.shape
    stride = format.panel_stride(inputs)
    data = _allocate(-(-outputs // LANES) * stride)
    stored = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(outputs, inputs * 4)
    pack_parts([("float32", stored)], format, inputs, data)
    return PackedWeight(format, values.shape, data, stride)


def pack_parts(
    parts: Sequence[tuple[str, np.ndarray]],
    format: Format,
    inputs: int,
    panels: np.ndarray,
) -> None:
    """Fill `panels` with the rows of `parts`, one part after another.

    parts: stored type, a key of _STORED_NUMBERS, and bytes (rows, bytes of a row) uint8.
    """
    numbered = [(_STORED_NUMBERS[name], stored) for name, stored in parts]
    kind, has_min, group_size = format
    _native.pack(
        panels,
        _NUMBERS[kind],
        has_min,
        inputs,
        numbered,
        inputs if group_size is None else group_size,
    )


def _allocate(num_bytes: int) -> np.ndarray:
    """(num_bytes,) uint8 zeros, aligned to pages, which are huge where the system has such: a
    decode step of SmolLM2-135M in 4 bits takes 4.9 ms from those and 5.4 from small ones.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


# --- which format ------------------------------------------------------------------------------


def format_of(request: WeightRequest, dtype: str, quantization: str | None) -> Format | None:
    """How to hold a weight; None for vectors, which are float32.

    Routers stay as they are stored. With `quantization` (a key of QUANTIZATIONS), other matrices
    get its bits; with 4 the table and the head still get 8, in groups of 32, where 4 cost most (of
    the default model, a quarter of all loss is theirs). Blocks that have the bits asked for are
    kept as they are.

    Without, a dtype's name is the format of all, and "stored" loses nothing: floats and blocks stay
    what they are; parts that differ get the least that holds both (Q4_0 beside Q4_1: 4 bits with
    minimum; all else: float32), and blocks that no format has are float32.
    """
    if "vector" in request.roles:
        return None
    stored = {part.dtype for part in request.parts}
    if "router" in request.roles:
        return _BY_DTYPE.get(stored.pop(), _BY_DTYPE["float32"])
    wanted = None if quantization is None else QUANTIZATIONS[quantization]
    if wanted is not None:
        bits_kept: tuple[int, ...] = (wanted.bits,)
    else:
        bits_kept = (4, 8) if dtype == "stored" else ()
    if stored == {"Q8_0"} and 8 in bits_kept:
        return _Q8
    if stored <= {"Q4_0", "Q4_1"} and 4 in bits_kept:
        return _Q4 if stored == {"Q4_0"} else _Q4_MIN
    if wanted is not None:
        if wanted.bits == 4 and request.roles != ("matrix",):
            return _Q8
        return Format(f"q{wanted.bits}", not wanted.is_symmetric, wanted.group_size)
    if dtype != "stored":
        return _BY_DTYPE[dtype]
    (only, *others) = stored
    return _BY_DTYPE["float32"] if others else _BY_DTYPE.get(only, _BY_DTYPE["float32"])


# --- the plan ----------------------------------------------------------------------------------


class NativeWeightPlan:
    """`WeightPlan` in one piece of memory, packed by all threads, or mapped from the disk's cache.

    source: identifies the files' content; None doesn't look at the cache.
    """

    def __init__(
        self,
        runtime: Runtime,
        requests: Sequence[WeightRequest],
        dtype: str,
        quantization: str | None,
        source: str | None,
    ) -> None:
        self._runtime = runtime
        self._requests = requests
        self._formats = [format_of(request, dtype, quantization) for request in requests]
        self._source = source
        self._begins: list[int] = []
        self._total_bytes = 0
        for num_bytes in self.num_bytes:
            self._begins.append(self._total_bytes)
            self._total_bytes += num_bytes

    @cached_property
    def formats(self) -> tuple[str, ...]:
        return tuple("float32" if format is None else str(format) for format in self._formats)

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Each a multiple of 64."""
        return tuple(
            -(-math.prod(request.shape) * 4 // 64) * 64
            if format is None
            else -(-request.shape[0] // LANES) * format.panel_stride(request.shape[1])
            for request, format in zip(self._requests, self._formats, strict=True)
        )

    def load(self) -> Iterator[tuple[NativeArray | PackedWeight, ...]]:
        cache = self._cache()
        data = cache.open() if cache is not None else None
        if data is not None:
            for index in range(len(self._requests)):
                yield self._arrays(index, data)
            return
        data = _allocate(self._total_bytes)
        pool = ThreadPoolExecutor(self._runtime.pool.threads, "octavo-pack")
        try:
            jobs = [self._start(pool, index, data) for index in range(len(self._requests))]
            for index, futures in enumerate(jobs):
                for future in futures:
                    future.result()
                yield self._arrays(index, data)
        finally:
            pool.shutdown(cancel_futures=True)
        if cache is not None:
            cache.save_in_background(data)

    def _cache(self) -> WeightCache | None:
        if self._source is None:
            return None
        try:
            folder = machine.cache_root() / "weights"
        except RuntimeError as error:  # a user without a home
            logger.info("packed weights are not kept (%s): set OCTAVO_CACHE_ROOT", error)
            return None
        weights = [
            (request.shape, request.offset, [(p.name, p.dtype) for p in request.parts], format)
            for request, format in zip(self._requests, self.formats, strict=True)
        ]
        content = json.dumps([octavo.__version__, _LAYOUT, self._source, weights])
        return WeightCache(folder, content, self._total_bytes)

    def _bytes_of(self, index: int, data: np.ndarray) -> np.ndarray:
        return data[self._begins[index] :][: self.num_bytes[index]]

    def _arrays(self, index: int, data: np.ndarray) -> tuple[NativeArray | PackedWeight, ...]:
        request, format = self._requests[index], self._formats[index]
        own = self._bytes_of(index, data)
        array: NativeArray | PackedWeight
        if format is None:
            values = own.view(np.float32)[: math.prod(request.shape)].reshape(request.shape)
            array = NativeArray.of(self._runtime, values)
        else:
            stride = format.panel_stride(request.shape[1])
            array = PackedWeight(format, request.shape, own, stride)
        return (array,) * len(request.roles)

    def _start(self, pool: ThreadPoolExecutor, index: int, data: np.ndarray) -> list[Future[None]]:
        request, format = self._requests[index], self._formats[index]
        own = self._bytes_of(index, data)
        if format is None:
            return [pool.submit(_fill_vector, request, own)]
        if request.offset:
            raise InvariantError(f"a matrix, {request.parts[0].name}, has an offset")
        outputs, inputs = request.shape
        stride = format.panel_stride(inputs)
        panels = max(1, _JOB_BYTES // stride)
        return [
            pool.submit(
                _fill_panels,
                request.parts,
                slice(first * LANES, min((first + panels) * LANES, outputs)),
                format,
                inputs,
                own[first * stride : (first + panels) * stride],
            )
            for first in range(0, len(own) // stride, panels)
        ]


def _fill_vector(request: WeightRequest, data: np.ndarray) -> None:
    out = data.view(np.float32)
    at = 0
    for part in request.parts:
        values = part.read(slice(None)).reshape(-1).astype(np.float32)
        out[at : at + len(values)] = values + np.float32(request.offset)
        at += len(values)


def _fill_panels(
    parts: Sequence[StoredArray], rows: slice, format: Format, inputs: int, panels: np.ndarray
) -> None:
    """Pack these rows of all parts together."""
    stored, begin = [], 0
    for part in parts:
        num_rows = part.shape[0]
        first, last = max(rows.start - begin, 0), min(rows.stop - begin, num_rows)
        if first < last:
            stored.append(_stored(part, slice(first, last)))
        begin += num_rows
    pack_parts(stored, format, inputs, panels)


def _stored(part: StoredArray, rows: slice) -> tuple[str, np.ndarray]:
    """Stored type and bytes of some rows, in a type that the packer reads."""
    if part.dtype in _BLOCKS:
        return part.dtype, part.read_stored(rows)
    values = np.ascontiguousarray(part.read(rows))
    if values.dtype.name not in _STORED_NUMBERS:
        values = values.astype(np.float32)
    return values.dtype.name, values.view(np.uint8).reshape(len(values), -1)
