"""bitsandbytes: 4-bit codes for 16 floats (NF4 and FP4, arXiv 2305.14314, section 3), and int8 with
a scale an output (arXiv 2208.07339, section 2).

4 bits, of a matrix (O, I) row after row:

    weight                    two codes a byte, the first in the high half
    weight.absmax             a scale for each `blocksize` weights: float32, or codes of its own,
      .nested_absmax          which nested_quant_map turns into floats, with a scale for each
      .nested_quant_map       `nested_blocksize`, and an offset
    weight.quant_map          (16,) what codes stand for
    weight.quant_state.bitsandbytes__nf4 (or fp4)   JSON: shape, sizes of blocks, offset

8 bits: weight (O, I) int8, SCB (O,) the largest magnitude of each row, w = SCB * weight / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.bits import nibbles
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.source import MAX_SIZE, Part, Scheme, Source

_STATE = ".quant_state.bitsandbytes__"
_LARGEST = float(np.finfo(np.float32).max)
_ANY = ("uint8", "int8", "bfloat16", "float16", "float32")  # what the bytes are said to be


def matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """Raises ConfigError for tensors that don't fit together."""
    for name in source.tensors:
        if _STATE in name:
            yield FourBitMatrix(name.partition(_STATE)[0], name, source)
        elif name.endswith(".SCB"):
            yield Int8Matrix(name.removesuffix(".SCB"), source)


class FourBitMatrix(QuantizedMatrix):
    def __init__(self, name: str, state_name: str, source: Source) -> None:
        state = _State(source, state_name)
        outputs, inputs = state.shape
        count, self._block = outputs * inputs, state.block
        self._weight = Part(source, name, _ANY)
        num_bytes = math.prod(self._weight.shape) * np.dtype(_numpy_name(self._weight)).itemsize
        if num_bytes != -(-count // 2) or inputs % 2:
            raise ConfigError(
                f"{source.name}: tensor {name!r} has {num_bytes} bytes for {outputs} rows of "
                f"{inputs} weights of 4 bits; fetch the model again"
            )
        blocks = -(-count // self._block)
        self._absmax = Part(source, f"{name}.absmax", ("float32", "uint8"), (blocks,))
        parts = [self._weight, self._absmax]
        self._nested: tuple[np.ndarray, np.ndarray, int, float] | None = None
        if self._absmax.dtype == "uint8":
            nested_blocks = -(-blocks // state.nested_block)
            values = Part(source, f"{name}.nested_quant_map", ("float32",), (256,))
            scales = Part(source, f"{name}.nested_absmax", ("float32",), (nested_blocks,))
            parts += [values, scales]
            self._nested = (values.read(), scales.read(), state.nested_block, state.offset)
        table = Part(source, f"{name}.quant_map", ("float32",), (16,))
        parts.append(table)
        if not np.isfinite(table.read()).all():
            raise ConfigError(
                f"{source.name}: tensor {table.name!r} has values that are no numbers; fetch the "
                "model again"
            )
        super().__init__(
            source,
            name,
            (outputs, inputs),
            f"bitsandbytes {state.kind.upper()}",
            (state_name, *(part.name for part in parts)),
            scale_dtype="float32",
            group=math.gcd(inputs, self._block),  # blocks may begin within a row
            kind="table",
            table=tuple(table.read().tolist()),
        )

    def codes(self, rows: slice) -> np.ndarray:
        stored = np.ascontiguousarray(self._weight.read()).view(np.uint8)
        return nibbles(stored.reshape(self.shape[0], -1)[rows], high_first=True)

    def scales(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(self.shape[0])
        groups = self.inputs // self.group
        blocks = np.arange(first * groups, last * groups) * self.group // self._block
        return self._scales_of(blocks).reshape(last - first, groups)

    def _scales_of(self, blocks: np.ndarray) -> np.ndarray:
        stored: np.ndarray = self._absmax.read()[blocks]
        if self._nested is None:
            return stored
        values, scales, block, offset = self._nested
        scaled: np.ndarray = values[stored] * scales[blocks // block]
        return scaled + np.float32(offset)


def _numpy_name(part: Part) -> str:
    return "uint16" if part.dtype == "bfloat16" else part.dtype


class _State:
    """What the JSON of a 4-bit matrix says. Raises ConfigError."""

    def __init__(self, source: Source, name: str) -> None:
        part = Part(source, name, ("uint8",))
        self.kind = name.partition(_STATE)[2]
        try:
            values: Any = json.loads(part.read().tobytes())
            self.shape: tuple[int, int] = tuple(values["shape"])
            self.block = values["blocksize"]
            self.nested_block = values.get("nested_blocksize", 256)
            self.offset = offset = values.get("nested_offset", 0.0)
            sizes = (*self.shape, self.block, self.nested_block)
            is_valid = (
                len(self.shape) == 2
                and all(type(n) is int and 0 < n <= MAX_SIZE for n in sizes)
                and abs(offset) <= _LARGEST
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid or self.kind not in ("nf4", "fp4"):
            raise ConfigError(
                f"{source.name}: tensor {name!r} is no description of an NF4 or FP4 matrix; fetch "
                "the model again"
            )


class Int8Matrix(QuantizedMatrix):
    def __init__(self, module: str, source: Source) -> None:
        self._weight = Part(source, f"{module}.weight", ("int8",))
        if len(self._weight.shape) != 2:
            raise ConfigError(
                f"{source.name}: tensor {self._weight.name!r} of {list(self._weight.shape)} is no "
                "matrix; fetch the model again"
            )
        outputs, inputs = self._weight.shape
        self._largest = Part(source, f"{module}.SCB", ("float32",), (outputs,))
        parts = [self._weight.name, self._largest.name]
        if (layout := f"{module}.weight_format") in source.tensors:
            parts.append(layout)
            if Part(source, layout, ("uint8",), (), (1,)).read().reshape(()) != 0:
                raise ConfigError(
                    f"{source.name}: {self._weight.name!r} is laid out for one GPU "
                    f"({layout!r} is not 0); save the model again with bitsandbytes 0.45 or newer"
                )
        super().__init__(
            source,
            f"{module}.weight",
            (outputs, inputs),
            "bitsandbytes int8",
            tuple(parts),
            scale_dtype="float32",
            group=inputs,
        )

    def codes(self, rows: slice) -> np.ndarray:
        return self._weight.read(rows).view(np.uint8) ^ np.uint8(128)

    def scales(self, rows: slice) -> np.ndarray:
        return self._largest.read(rows)[:, None] / np.float32(127)
