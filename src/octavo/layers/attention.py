"""Self-attention with grouped heads."""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.ops import Array, BatchContext, paged_attention, rotary, split_columns, write_kv


class Attention(Layer):
    """Grouped-query attention over the paged cache. Source: arXiv 2305.13245.

    index: which of `ctx.kv_layers` is this layer's. spec: heads and window. softmax_scale: None is
    head_dim ** -0.5. query_norm, key_norm: over each head, before the rotation. qkv_bias,
    output_bias: whether the projections have biases. columns: as of `Weight`, of query, key and
    value projections. x (T, D) -> (T, D).
    """

    def __init__(
        self,
        name: str,
        index: int,
        hidden_size: int,
        spec: AttentionSpec,
        rope: RopeTable,
        *,
        softmax_scale: float | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        self.index = index
        self.spec = spec
        self.rope = rope
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.columns = (queries, keys, keys)
        self.qkv = Linear(
            {f"{name}.q_proj": queries, f"{name}.k_proj": keys, f"{name}.v_proj": keys},
            hidden_size,
            has_bias=qkv_bias,
            columns=columns,
        )
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.output = Linear({f"{name}.o_proj": hidden_size}, queries, has_bias=output_bias)

    def __call__(self, x: Array, ctx: BatchContext) -> Array:
        return self.attend(self.qkv(x), ctx)

    def attend(self, qkv: Array, ctx: BatchContext) -> Array:
        """All that follows the projections, whose results are side by side in `qkv`."""
        q, k, v = split_columns(qkv, self.columns)
        q = q.reshape(-1, self.spec.num_heads, self.spec.head_dim)
        k = k.reshape(-1, self.spec.num_kv_heads, self.spec.head_dim)
        v = v.reshape(-1, self.spec.num_kv_heads, self.spec.head_dim)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if self.key_norm is not None:
            k = self.key_norm(k)
        q = rotary(q, self.rope.array, ctx.positions)
        k = rotary(k, self.rope.array, ctx.positions)
        cache = ctx.kv_layers[self.index]
        write_kv(k, v, cache, ctx)
        y = paged_attention(
            q, cache, ctx, softmax_scale=self.softmax_scale, window=self.spec.window
        )
        return self.output(y.reshape(-1, self.columns[0]))
