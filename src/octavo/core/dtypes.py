"""The names of dtypes: what models compute in, and what weights and caches are stored in."""

from __future__ import annotations

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
"""Other spellings that `--dtype` takes."""

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")
"""How a KV cache may store values. Not every backend has all."""

KV_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}
"""Other spellings that `--kv-cache-dtype` takes."""

QUANTIZATIONS = ("int8", "int4")
"""What weights may be quantized to as they are loaded."""
