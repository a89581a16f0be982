"""Token embedding."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def embedding(table: Array, token_ids: Array, first: int = 0) -> Array:
    """y[t] = table[token_ids[t] - first], or zeros where the table has no such row.

    first: the token of the table's first row, where it is a part of one. Shapes: table (V, D),
    token_ids (T,) -> (T, D).
    """
    raise NotImplementedError
