"""How matrices may lie in memory, and which way each weight gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from octavo.core.dtypes import QUANTIZATIONS, Quantization
from octavo.ops.backend import StoredArray, WeightRequest
from octavo.ops.native import _native
from octavo.quantization.grouped import ZERO, GroupedLayout, GroupedRows, GroupedTensor

GROUP = 32
"""Weights along a row that share a scale."""

_VALUES = ("f32", "bf16", "f16", "q8", "q4", "e2m1", "f8", "nf4", "fp4")
_SCALES = ("f16", "bf16", "f32", "k8")
_OFFSETS: tuple[Literal["min", "zero"] | None, ...] = (None, "min", "zero")
"""In the order of csrc/formats.h's Values, Scales and Offset."""

_NAMES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "q8": "int8",
    "q4": "int4",
    "e2m1": "mxfp4",
    "f8": "fp8",
    "nf4": "nf4",
    "fp4": "fp4",
}
_SCALE_NAMES = {"bf16": "bfloat16 scales", "f32": "float32 scales", "k8": "int8 scales"}


class Format(NamedTuple):
    """A matrix's format: a WeightFormat of csrc/formats.h.

    kind: of Values. span: inputs that share a scale. group_size: weights along a row that get the
    same scale (and minimum) where they are quantized as they are packed, a multiple of 32; None for
    the whole row.
    """

    kind: str
    offset: Literal["min", "zero"] | None = None
    scales: str = "f16"
    span: int = 32
    group_size: int | None = GROUP

    def __str__(self) -> str:
        name = _NAMES[self.kind]
        if self.offset is not None:
            name += " with minimum" if self.offset == "min" else " with zero point"
        if self.group_size is None:
            name += " by channel"
        elif self.group_size != GROUP:
            name += f" in groups of {self.group_size}"
        if self.span != GROUP:
            name += f" in groups of {self.span}"
        if self.scales in _SCALE_NAMES and self.kind in ("q8", "q4"):
            name += f", {_SCALE_NAMES[self.scales]}"
        return name

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As the extension module takes it."""
        return (
            _VALUES.index(self.kind),
            _SCALES.index(self.scales),
            _OFFSETS.index(self.offset),
            self.span,
        )

    @property
    def is_integer(self) -> bool:
        """Whether it is multiplied with activations in 8 bits."""
        return self.kind in ("q8", "q4", "e2m1")

    @property
    def bits(self) -> int:
        """Of a value."""
        return {"f32": 32, "bf16": 16, "f16": 16, "q8": 8, "f8": 8}.get(self.kind, 4)

    def panel_stride(self, inputs: int) -> int:
        """Bytes from one panel to the next."""
        return _native.panel_bytes(self.numbers, inputs)


def format_of_numbers(numbers: tuple[int, int, int, int]) -> Format:
    """From what the extension module says."""
    values, scales, offset, span = numbers
    return Format(_VALUES[values], _OFFSETS[offset], _SCALES[scales], span)


BY_DTYPE = {"float32": Format("f32"), "bfloat16": Format("bf16"), "float16": Format("f16")}

BLOCKS = {
    "Q8_0": Format("q8"),
    "Q4_0": Format("q4"),
    "Q4_1": Format("q4", "min"),
    "Q5_0": Format("q8"),
    "Q5_1": Format("q8", "min", "f32"),
    "Q2_K": Format("q4", "min", "k8", 16),
    "Q3_K": Format("q4", None, "k8", 16),
    "Q4_K": Format("q4", "min", "k8"),
    "Q5_K": Format("q8", "min", "k8"),
    "Q6_K": Format("q8", None, "k8", 16),
}
"""GGUF's types of blocks, in the order of csrc/stored_rows.h, and what loses nothing of each."""

STORED_TYPES = ("float32", "bfloat16", "float16", *BLOCKS, "codes")
"""In the order of csrc/stored_rows.h's StoredType."""

_KNOWN = frozenset(_native.weight_formats())
_TABLES = {tuple(numbers): kind for kind, numbers in _native.tables().items()}
_SCALES_OF = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def format_of_codes(layout: GroupedLayout) -> Format | None:
    """What holds a matrix of this layout exactly; None if nothing does.

    Minimums in float32 stand for all offsets that no format has with the layout's own scales.
    """
    offset: Literal["zero"] | None = "zero" if layout.has_zeros else None
    if layout.codes == "table":
        kind = _TABLES.get(layout.table or ())
    else:
        kind = {"int4": "q4", "int8": "q8", "fp8": "f8"}[layout.codes]
    if kind is None:
        return None
    span = layout.group_size
    own = Format(kind, offset, _SCALES_OF[layout.scale_dtype], span)
    wider = [own._replace(scales="f32"), own._replace(scales="f32", offset="min")]
    return next((format for format in (own, *wider) if format.numbers in _KNOWN), None)


class HeldPart(NamedTuple):
    """A part of a weight, and how it is held. tensor: whose codes are kept as they are."""

    part: StoredArray
    format: Format
    tensor: GroupedTensor | None = None


def held_parts(
    request: WeightRequest, dtype: str, quantization: str | None
) -> tuple[HeldPart, ...] | None:
    """How to hold each part of a weight; None for vectors, which are float32.

    With `quantization` (a key of QUANTIZATIONS), matrices get its bits; with 4 and with floats the
    table and the head still get int8, in groups of 32, where 4 cost most (of the default model, a
    quarter of all loss is theirs). What is stored in the bits asked for is kept as it is.

    Without, a dtype's name is the format of all, and "stored" loses nothing: parts stay what they
    are, but Q4_0 beside Q4_1 gets a minimum, so that they are one matrix, and what no format holds
    is float32. Weights that must be one matrix are float32 if their parts differ. Routers are
    always held as they are stored.
    """
    if "vector" in request.roles:
        return None
    wanted = None
    if "router" in request.roles:
        dtype = "stored"
    elif quantization is not None:
        wanted = QUANTIZATIONS[quantization]
    held = []
    for part in request.parts:
        kept = _kept(part) if wanted is not None or dtype == "stored" else None
        if kept is not None and (wanted is None or _is_as_asked(kept.format, wanted)):
            held.append(kept)
        elif wanted is not None:
            held.append(HeldPart(part, _quantized(wanted, request)))
        elif dtype == "stored":
            held.append(HeldPart(part, BY_DTYPE.get(part.dtype, BY_DTYPE["float32"])))
        else:
            held.append(HeldPart(part, BY_DTYPE[dtype]))
    formats = {one.format for one in held}
    if formats == {BLOCKS["Q4_0"], BLOCKS["Q4_1"]} and all(one.tensor is None for one in held):
        held = [one._replace(format=BLOCKS["Q4_1"]) for one in held]
    elif request.roles != ("matrix",) and (len(formats) > 1 or _has_order(held)):
        held = [HeldPart(part, BY_DTYPE["float32"]) for part in request.parts]
    return tuple(held)


def _has_order(held: Sequence[HeldPart]) -> bool:
    return any(one.tensor is not None and one.tensor.input_order is not None for one in held)


def _is_as_asked(format: Format, wanted: Quantization) -> bool:
    return format.bits == wanted.bits and (format.kind == "f8") == wanted.is_float


def _quantized(wanted: Quantization, request: WeightRequest) -> Format:
    is_inner = not {"matrix", "matrices"}.isdisjoint(request.roles)
    if (wanted.bits == 4 or wanted.is_float) and not is_inner:
        return Format("q8")
    if wanted.is_float:
        return Format("f8", scales="f32", group_size=wanted.group_size)
    offset: Literal["min"] | None = None if wanted.is_symmetric else "min"
    return Format(f"q{wanted.bits}", offset, group_size=wanted.group_size)


def _kept(part: StoredArray) -> HeldPart | None:
    """With the codes that are stored; None for floats, and where no format holds them."""
    if part.dtype in BLOCKS:
        return HeldPart(part, BLOCKS[part.dtype])
    if (tensor := part.grouped()) is None:
        return None
    format = format_of_codes(tensor.layout)
    return None if format is None else HeldPart(part, format, tensor)


def offsets_of(layout: GroupedLayout, rows: GroupedRows, format: Format) -> np.ndarray | None:
    """(rows, groups) float32: the zero points or minimums of rows as a format has them."""
    if format.offset is None:
        return None
    if format.offset == "zero":
        offsets = rows.zeros
    else:
        zeros = rows.zeros if layout.has_zeros else np.float32(ZERO[layout.codes])
        offsets = -(rows.scales * zeros)
    return np.ascontiguousarray(offsets, np.float32)
