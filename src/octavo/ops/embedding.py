"""Token embedding."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def embedding(table: Array, token_ids: Array) -> Array:
    """y[t] = table[token_ids[t]]. Shapes: table (V, D), token_ids (T,) -> (T, D)."""
    raise NotImplementedError
