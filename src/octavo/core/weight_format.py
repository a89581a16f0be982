"""In how many bits weights are stored, all that belongs to them included."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.dtypes import QUANTIZATIONS
from octavo.core.errors import ConfigError


class WeightFormat(NamedTuple):
    """bits: of one weight, with its share of scales and minimums. compute: in which dtype a GPU
    multiplies it, one of `DTYPES` of simulator/hardware.py.
    """

    name: str
    bits: float
    compute: str

    def num_bytes(self, num_weights: float) -> float:
        return num_weights * self.bits / 8


_DENSE = (
    WeightFormat("float32", 32, "float32"),
    WeightFormat("bfloat16", 16, "bfloat16"),
    WeightFormat("float16", 16, "bfloat16"),
    WeightFormat("fp8", 8, "fp8"),
    # int8: one scale an output channel. Octavo's, in groups, are below.
    WeightFormat("int8", 8, "int8"),
    # Groups of 128 with a float16 scale and a 4-bit zero point: what GPTQ and AWQ write.
    WeightFormat("int4", 4 + (16 + 4) / 128, "bfloat16"),
    # Open Compute Project, Microscaling Formats 1.0: 32 values share an 8-bit exponent.
    WeightFormat("mxfp4", 4 + 8 / 32, "fp4"),
    # NVIDIA's: 16 values share an fp8 scale.
    WeightFormat("nvfp4", 4 + 8 / 16, "fp4"),
)
# Bytes of a block over weights of a block: ggml/src/ggml-common.h of github.com/ggml-org/ggml.
_GGUF_BLOCKS = {
    "Q4_0": (18, 32), "Q4_1": (20, 32), "Q5_0": (22, 32), "Q5_1": (24, 32), "Q8_0": (34, 32),
    "Q2_K": (84, 256), "Q3_K": (110, 256), "Q4_K": (144, 256), "Q5_K": (176, 256),
    "Q6_K": (210, 256), "IQ4_NL": (18, 32), "IQ4_XS": (136, 256),
}  # fmt: skip

WEIGHT_FORMATS = {one.name: one for one in _DENSE} | {
    name: WeightFormat(name, 8 * num_bytes / weights, "bfloat16")
    for name, (num_bytes, weights) in _GGUF_BLOCKS.items()
}
_FP8_IN_GROUPS = WeightFormat("fp8", 8 + 32 / 32, "bfloat16")  # a float32 scale for each 32
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "awq": "int4", "gptq": "int4"}


def weight_format(name: str) -> WeightFormat:
    """By a name of `WEIGHT_FORMATS` or a usual other one. Raises ConfigError."""
    names = (_ALIASES.get(name.lower(), name), name.upper(), name.lower())
    found = next((WEIGHT_FORMATS[one] for one in names if one in WEIGHT_FORMATS), None)
    if found is None:
        known = ", ".join((*WEIGHT_FORMATS, *_ALIASES))
        raise ConfigError(f"no weight format {name!r} is known; use one of {known}")
    return found


def quantized_formats(quantization: str) -> tuple[WeightFormat, WeightFormat]:
    """Of the layers' matrices, and of embedding and head, where Octavo quantizes weights as it
    loads them: in blocks like these of GGUF, whose scales larger groups repeat, or 8-bit floats.

    quantization: a key of `QUANTIZATIONS`.
    """
    made, of_8_bits = QUANTIZATIONS[quantization], WEIGHT_FORMATS["Q8_0"]
    if made.is_float:
        return _FP8_IN_GROUPS, of_8_bits
    if made.bits == 8:
        return of_8_bits, of_8_bits
    return WEIGHT_FORMATS["Q4_0" if made.is_symmetric else "Q4_1"], of_8_bits
