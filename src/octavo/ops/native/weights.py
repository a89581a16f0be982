"""A model's weights in packed panels, and how they are filled.

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
from itertools import groupby
from operator import itemgetter

import numpy as np

import octavo
from octavo import machine
from octavo.core.errors import InvariantError
from octavo.ops.backend import WeightRequest
from octavo.ops.native import _native
from octavo.ops.native.array import NativeArray
from octavo.ops.native.runtime import Runtime
from octavo.ops.native.weight_cache import WeightCache
from octavo.ops.native.weight_formats import (
    BLOCKS,
    BY_DTYPE,
    STORED_TYPES,
    Format,
    HeldPart,
    held_parts,
    offsets_of,
)

logger = logging.getLogger("octavo")

LANES = 16
"""Outputs of a panel."""

_JOB_BYTES = 1 << 21
"""Of panels that a thread fills at a time: large matrices are shared out, and what is dequantized
for a moment stays small.
"""

_LAYOUT = 4
"""Raised with every change of the bytes that the same checkpoint is packed to."""

StoredPart = tuple[str, np.ndarray, np.ndarray | None, np.ndarray | None]
"""Rows in a type of STORED_TYPES: bytes (rows, bytes of a row) uint8; scales and offsets
(rows, groups) float32, of codes alone.
"""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix (O, I) in panels. data: (bytes,) uint8, 64-byte aligned; lives as long as this.
    order: (I,) int32, which of the activations column k is for; None if it is k.
    """

    format: Format
    shape: tuple[int, ...]
    data: np.ndarray
    panel_stride: int
    order: np.ndarray | None = None

    @cached_property
    def matrix(self) -> _native.PackedMatrix:
        """What kernels take; it keeps the data alive."""
        outputs, inputs = self.shape
        return _native.PackedMatrix(
            self.format.numbers, outputs, inputs, self.data, self.panel_stride, self.order
        )

    @property
    def matrices(self) -> list[_native.PackedMatrix]:
        return [self.matrix]

    def reshape(self, *shape: int) -> PackedWeight:
        raise InvariantError(f"a packed matrix of {self.shape} can't be seen as {shape}")


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """Matrices of several formats, one below another: rows whose types have no format together."""

    parts: tuple[PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def matrices(self) -> list[_native.PackedMatrix]:
        return [part.matrix for part in self.parts]

    def reshape(self, *shape: int) -> StackedWeight:
        raise InvariantError(f"packed matrices of {self.shape} can't be seen as {shape}")


Weight = PackedWeight | StackedWeight


def pack_rows(values: np.ndarray, format: Format = BY_DTYPE["float32"]) -> PackedWeight:
    """A matrix (O, I) of float32, packed on the calling thread."""
    outputs, inputs = values.shape
    stride = format.panel_stride(inputs)
    data = _allocate(-(-outputs // LANES) * stride)
    stored = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(outputs, inputs * 4)
    pack_parts([("float32", stored, None, None)], format, inputs, data)
    return PackedWeight(format, values.shape, data, stride)


def pack_parts(
    parts: Sequence[StoredPart],
    format: Format,
    inputs: int,
    panels: np.ndarray,
) -> None:
    """Fill `panels` with the rows of `parts`, one part after another."""
    _native.pack(
        panels,
        format.numbers,
        inputs,
        [(STORED_TYPES.index(name), rows, s, o) for name, rows, s, o in parts],
        inputs if format.group_size is None else format.group_size,
    )


def _allocate(num_bytes: int) -> np.ndarray:
    """(num_bytes,) uint8 zeros, aligned to pages, which are huge where the system has such: a
    decode step of SmolLM2-135M in 4 bits takes 4.9 ms from those and 5.4 from small ones.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


@dataclass(frozen=True)
class _Piece:
    """Parts of a weight that become one matrix. order: as PackedWeight has it."""

    parts: tuple[HeldPart, ...]
    order: np.ndarray | None

    @property
    def format(self) -> Format:
        return self.parts[0].format

    @property
    def shape(self) -> tuple[int, int]:
        shapes = [held.part.shape for held in self.parts]
        return (sum(rows for rows, _ in shapes), shapes[0][1])

    @property
    def panel_stride(self) -> int:
        return self.format.panel_stride(self.shape[1])

    @property
    def num_bytes(self) -> int:
        """A multiple of 64."""
        return -(-self.shape[0] // LANES) * self.panel_stride


def _pieces(held: Sequence[HeldPart], orders: dict[bytes, np.ndarray]) -> tuple[_Piece, ...]:
    """Neighbours in one format, and with one order of inputs, become one matrix.

    orders: those met so far. Equal ones become one array: activations are then put in it once.
    """
    keys = []
    for one in held:
        order = None if one.tensor is None else one.tensor.input_order
        key = b"" if order is None else order.astype(np.int32).tobytes()
        if order is not None:
            orders.setdefault(key, order.astype(np.int32))
        keys.append((one.format, key))
    runs = groupby(zip(keys, held, strict=True), itemgetter(0))
    return tuple(_Piece(tuple(one for _, one in run), orders.get(key)) for (_, key), run in runs)


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
        self._source = source
        orders: dict[bytes, np.ndarray] = {}
        self._pieces: list[tuple[_Piece, ...] | None] = []  # None: a vector
        for request in requests:
            held = held_parts(request, dtype, quantization)
            self._pieces.append(None if held is None else _pieces(held, orders))
        self._begins: list[int] = []
        self._total_bytes = 0
        for num_bytes in self.num_bytes:
            self._begins.append(self._total_bytes)
            self._total_bytes += num_bytes

    @cached_property
    def formats(self) -> tuple[str, ...]:
        return tuple(
            "float32" if pieces is None else " + ".join(str(piece.format) for piece in pieces)
            for pieces in self._pieces
        )

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Each a multiple of 64."""
        return tuple(
            -(-math.prod(request.shape) * 4 // 64) * 64
            if pieces is None
            else sum(piece.num_bytes for piece in pieces)
            for request, pieces in zip(self._requests, self._pieces, strict=True)
        )

    def load(self) -> Iterator[tuple[NativeArray | Weight, ...]]:
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

    def _arrays(self, index: int, data: np.ndarray) -> tuple[NativeArray | Weight, ...]:
        request, pieces = self._requests[index], self._pieces[index]
        own = self._bytes_of(index, data)
        array: NativeArray | Weight
        if pieces is None:
            values = own.view(np.float32)[: math.prod(request.shape)].reshape(request.shape)
            array = NativeArray.of(self._runtime, values)
        else:
            packed = tuple(
                PackedWeight(piece.format, piece.shape, panels, piece.panel_stride, piece.order)
                for piece, panels in _with_memory(pieces, own)
            )
            array = packed[0] if len(packed) == 1 else StackedWeight(packed)
        return (array,) * len(request.roles)

    def _start(self, pool: ThreadPoolExecutor, index: int, data: np.ndarray) -> list[Future[None]]:
        request, pieces = self._requests[index], self._pieces[index]
        own = self._bytes_of(index, data)
        if pieces is None:
            return [pool.submit(_fill_vector, request, own)]
        if request.offset:
            raise InvariantError(f"a matrix, {request.parts[0].name}, has an offset")
        jobs = []
        for piece, memory in _with_memory(pieces, own):
            stride = piece.panel_stride
            panels = max(1, _JOB_BYTES // stride)
            for first in range(0, len(memory) // stride, panels):
                rows = slice(first * LANES, min((first + panels) * LANES, piece.shape[0]))
                own_panels = memory[first * stride : (first + panels) * stride]
                jobs.append(pool.submit(_fill_panels, piece, rows, own_panels))
        return jobs


def _with_memory(
    pieces: Sequence[_Piece], memory: np.ndarray
) -> Iterator[tuple[_Piece, np.ndarray]]:
    """Each piece and its part of the memory of all."""
    begin = 0
    for piece in pieces:
        yield piece, memory[begin : begin + piece.num_bytes]
        begin += piece.num_bytes


def _fill_vector(request: WeightRequest, data: np.ndarray) -> None:
    out = data.view(np.float32)
    at = 0
    for part in request.parts:
        values = part.read(slice(None)).reshape(-1).astype(np.float32)
        out[at : at + len(values)] = values + np.float32(request.offset)
        at += len(values)


def _fill_panels(piece: _Piece, rows: slice, panels: np.ndarray) -> None:
    """Pack these rows of all parts together."""
    stored, begin = [], 0
    for held in piece.parts:
        num_rows = held.part.shape[0]
        first, last = max(rows.start - begin, 0), min(rows.stop - begin, num_rows)
        if first < last:
            stored.append(_stored(held, slice(first, last)))
        begin += num_rows
    pack_parts(stored, piece.format, piece.shape[1], panels)


def _stored(held: HeldPart, rows: slice) -> StoredPart:
    """Some rows of a part in a type that the packer reads."""
    part, format, tensor = held
    if part.dtype in BLOCKS:
        return part.dtype, np.ascontiguousarray(part.read_stored(rows)), None, None
    if tensor is not None:
        codes = tensor.read(rows)
        scales = np.ascontiguousarray(codes.scales, np.float32)
        offsets = offsets_of(tensor.layout, codes, format)
        return "codes", np.ascontiguousarray(codes.codes), scales, offsets
    values = np.ascontiguousarray(part.read(rows))
    if values.dtype.name not in BY_DTYPE:
        values = values.astype(np.float32)
    return values.dtype.name, values.view(np.uint8).reshape(len(values), -1), None, None
