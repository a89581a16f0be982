"""The dtypes that models compute in, by name."""

from __future__ import annotations

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
"""Other spellings that `--dtype` takes."""
