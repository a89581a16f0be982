"""Matrices of 8-bit floats (e4m3) with scales: a tensor's, an output's, or those of blocks.

    weight        (O, I)   float8_e4m3fn
    weight_scale  or weight_scale_inv, in a shape of `scales.Scales`: weight = value * scale

DeepSeek's models and their relatives have blocks of 128 x 128 (arXiv 2412.19437, section 3.3);
others have scales of tensors and outputs. Activations are not rounded to 8-bit floats here, so the
scales that checkpoints bring for them are left unread.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.fp4 import FP4Matrix
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.scales import MX_EXPONENTS, Scales, one_scale, scale_dtype
from octavo.quantization.source import FLOATS, Part, Scheme, Source

E4M3 = "float8_e4m3fn"


def matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """Of "fp8" and "fbgemm_fp8". Raises ConfigError for tensors that don't fit together."""
    block = scheme.block("weight_block_size")
    for name, spec in source.tensors.items():
        if spec.dtype == E4M3 and name.endswith(".weight"):
            scale = f"{name}_scale_inv"
            if scale not in source.tensors:
                scale = f"{name}_scale"
            yield FP8Matrix(name, scale, source, block)
        elif spec.dtype == "float8_e5m2":
            raise ConfigError(
                f"{source.name}: tensor {name!r} is float8_e5m2, which no checkpoint format that "
                "Octavo reads has for weights; e4m3 is read"
            )


def modelopt_matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """NVIDIA ModelOpt's "FP8", and its "NVFP4": bytes of two 4-bit floats in groups of 16."""
    algorithm = scheme.text("quant_algo", "")
    if algorithm == "fp8":
        yield from matrices(scheme, source)
        return
    if algorithm != "nvfp4":
        raise scheme.error("quant_algo", "FP8 or NVFP4")
    for name, spec in source.tensors.items():
        if spec.dtype == "uint8" and name.endswith(".weight"):
            factor = one_scale(source, f"{name}_scale_2")
            yield FP4Matrix(
                name,
                source,
                Part(source, name, ("uint8",)),
                f"{name}_scale",
                group=16,
                factor=factor,
                parts=(f"{name}_scale_2",),
            )


class FP8Matrix(QuantizedMatrix):
    """block: rows and columns of those that share a scale, where there are such."""

    def __init__(
        self, name: str, scale: str, source: Source, block: tuple[int, int] | None
    ) -> None:
        self._weight = Part(source, name, (E4M3,))
        if len(self._weight.shape) != 2:
            raise ConfigError(
                f"{source.name}: tensor {name!r} of {list(self._weight.shape)} is no matrix; only "
                "matrices are read as 8-bit floats"
            )
        outputs, inputs = self._weight.shape
        rows, columns = block or (1, None)
        self._scales = Scales(
            source,
            scale,
            (outputs, inputs),
            group=columns,
            block_rows=rows,
            dtypes=(*FLOATS, *MX_EXPONENTS),
        )
        super().__init__(
            source,
            name,
            (outputs, inputs),
            "FP8",
            (name, scale),
            scale_dtype=scale_dtype(self._scales.part),
            group=self._scales.group,
            kind="fp8",
        )

    def codes(self, rows: slice) -> np.ndarray:
        return self._weight.read(rows).view(np.uint8)

    def scales(self, rows: slice) -> np.ndarray:
        return self._scales.read(rows)
