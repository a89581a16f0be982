"""4-bit floats (e2m1), two a byte, the first in the low half: MXFP4 and NVFP4.

MXFP4 has groups of 32 and scales that are powers of two (OCP Microscaling Formats 1.0); gpt-oss
keeps its experts in it:

    experts.gate_up_proj_blocks  (E, O, I / 32, 16)   uint8
    experts.gate_up_proj_scales  (E, O, I / 32)       uint8: exponents, 127 is 1

NVFP4 has groups of 16, scales that are 8-bit floats, and one factor a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.bits import nibbles
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.scales import MX_EXPONENTS, Scales, scale_dtype, scale_values
from octavo.quantization.source import Part, Scheme, Source

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


def mxfp4_matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """Of "mxfp4". Raises ConfigError for tensors that don't fit together.

    A tensor of experts has the matrices (O, I) as they are stored here, though those of unquantized
    gpt-oss lie the other way round, (I, O).
    """
    for name in source.tensors:
        if name.endswith("_blocks"):
            yield MXFP4Experts(name.removesuffix("_blocks"), source)


class MXFP4Experts(QuantizedMatrix):
    def __init__(self, name: str, source: Source) -> None:
        self._blocks = Part(source, f"{name}_blocks", ("uint8",))
        if len(self._blocks.shape) != 4 or self._blocks.shape[3] != 16:
            raise ConfigError(
                f"{source.name}: tensor {self._blocks.name!r} of {list(self._blocks.shape)} has no "
                "blocks of 16 bytes, 32 values, which MXFP4 consists of; fetch the model again"
            )
        experts, self._outputs, groups, _ = self._blocks.shape
        self._exponents = Part(
            source, f"{name}_scales", MX_EXPONENTS, (experts, self._outputs, groups)
        )
        super().__init__(
            source,
            name,
            (experts, self._outputs, groups * 32),
            "MXFP4",
            (self._blocks.name, self._exponents.name),
            scale_dtype=scale_dtype(self._exponents),
            group=32,
            kind="table",
            table=E2M1,
        )

    def codes(self, rows: slice) -> np.ndarray:
        stored = self._rows(self._blocks, rows)
        return nibbles(stored.reshape(len(stored), -1))

    def scales(self, rows: slice) -> np.ndarray:
        return scale_values(self._rows(self._exponents, rows))

    def _rows(self, part: Part, rows: slice) -> np.ndarray:
        """Those of all matrices, one under another."""
        stored = part.read()
        return stored.reshape(-1, *stored.shape[2:])[rows]


class FP4Matrix(QuantizedMatrix):
    """weight = value * scale * factor. packed: (O, I / 2). parts: further tensors that it has."""

    def __init__(
        self,
        name: str,
        source: Source,
        packed: Part,
        scale: str,
        *,
        group: int,
        factor: np.float32 | None = None,
        parts: tuple[str, ...] = (),
    ) -> None:
        if len(packed.shape) != 2:
            raise ConfigError(
                f"{source.name}: tensor {packed.name!r} of {list(packed.shape)} is no matrix; only "
                "matrices are read as 4-bit floats"
            )
        outputs, inputs = packed.shape[0], 2 * packed.shape[1]
        dtypes = MX_EXPONENTS if factor is None else ("float8_e4m3fn",)
        self._packed = packed
        self._factor = factor
        self._scales = Scales(source, scale, (outputs, inputs), group=group, dtypes=dtypes)
        super().__init__(
            source,
            name,
            (outputs, inputs),
            "MXFP4" if factor is None else "NVFP4",
            (packed.name, scale, *parts),
            scale_dtype="bfloat16" if factor is None else "float32",
            group=self._scales.group,
            kind="table",
            table=E2M1,
        )

    def codes(self, rows: slice) -> np.ndarray:
        return nibbles(self._packed.read(rows))

    def scales(self, rows: slice) -> np.ndarray:
        scales = self._scales.read(rows)
        return scales if self._factor is None else scales * self._factor
