"""The names of dtypes: what models compute in, and what weights and caches are stored in."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.errors import ConfigError

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
"""Other spellings that `--dtype` takes."""

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")
"""How a KV cache may store values. Not every backend has all."""

KV_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}
"""Other spellings that `--kv-cache-dtype` takes."""


def plain_kv_dtype(asked: str) -> str:
    """What `--kv-cache-dtype` asks for, without aliases: "auto", one of KV_DTYPES, or two of them,
    the keys' and the values', with a comma between them ("int8,int4"). Raises ConfigError.
    """
    names = [KV_DTYPE_ALIASES.get(name, name) for name in asked.split(",")]
    if asked == "auto":
        return asked
    if len(names) > 2 or any(name not in KV_DTYPES for name in names):
        known = ", ".join((*KV_DTYPES, *KV_DTYPE_ALIASES))
        raise ConfigError(
            f"--kv-cache-dtype must be auto, or one of {known}, or two of these for keys and "
            f"values, such as int8,int4; got {asked!r}"
        )
    return names[0] if names[0] == names[-1] else ",".join(names)


class Quantization(NamedTuple):
    """bits: 8 or 4. group_size: weights along a row that share a scale; None is the whole row, one
    scale an output channel. is_symmetric: without a zero point; 8 bits never have one. is_float:
    e4m3, of 8 bits.
    """

    bits: int
    group_size: int | None = 32
    is_symmetric: bool = True
    is_float: bool = False


QUANTIZATIONS = {
    "int8": Quantization(8),
    "int8-g64": Quantization(8, 64),
    "int8-g128": Quantization(8, 128),
    "int8-channel": Quantization(8, None),
    "int4": Quantization(4, is_symmetric=False),
    "int4-g64": Quantization(4, 64, is_symmetric=False),
    "int4-g128": Quantization(4, 128, is_symmetric=False),
    "int4-sym": Quantization(4),
    "int4-sym-g64": Quantization(4, 64),
    "int4-sym-g128": Quantization(4, 128),
    "fp8": Quantization(8, is_float=True),
}
"""What weights may be quantized to as they are loaded, by the names that `--quantization` takes."""

INTEGER_QUANTIZATIONS = {name: form for name, form in QUANTIZATIONS.items() if not form.is_float}
"""Those that `octavo quantize` writes."""
