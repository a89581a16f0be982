"""Multi-head latent attention: one small vector is cached for all heads."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.model_spec import LatentAttentionSpec
from octavo.layers.layer import Layer, Piece, Weight
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.layers.share import Share
from octavo.ops import (
    Array,
    BatchContext,
    head_linear,
    latent_attention,
    rotary,
    split_columns,
    write_latent,
)
from octavo.parallel.division import divide_heads

_NORM_EPS = 1e-6  # of both inner norms, whatever that of the others is


class LatentAttention(Layer):
    """Attention whose heads' keys and values are made of a cached vector c; the product with the
    matrix of keys is done to the query instead, that with the one of values to what attention
    gives, so that no head's keys or values ever exist. Source: arXiv 2405.04434, section 2.1.

    index: which of `ctx.kv_layers` is this layer's. is_interleaved: rotary embedding turns
    dimensions 2i and 2i + 1; at load they are sorted into the halves that the op turns, which
    changes no product of a query and a key. has_heads_apart: the matrices of keys (turned round)
    and of values are two tensors with a matrix a head, as in GGUF files. x (T, D) -> (T, D).
    """

    def __init__(
        self,
        name: str,
        index: int,
        hidden_size: int,
        spec: LatentAttentionSpec,
        rope: RopeTable,
        *,
        softmax_scale: float,
        has_bias: bool = False,
        is_interleaved: bool = True,
        has_heads_apart: bool = False,
    ) -> None:
        self.index = index
        self.spec = spec
        self.rope = rope
        self.softmax_scale = softmax_scale
        heads, nope, value = spec.num_heads, spec.nope_dim, spec.value_dim
        queries = heads * (nope + spec.rope_dim)

        def rotated_rows(first: int) -> list[range]:
            last = first + spec.rope_dim
            if not is_interleaved:
                return [range(first, last)]
            return [range(first, last, 2), range(first + 1, last, 2)]

        self.query_a: Linear | None = None
        self.query_norm: RMSNorm | None = None
        stored, inputs = f"{name}.q_proj", hidden_size
        if spec.query_rank is not None:
            stored, inputs = f"{name}.q_b_proj", spec.query_rank
            self.query_a = Linear({f"{name}.q_a_proj": inputs}, hidden_size, has_bias=has_bias)
            self.query_norm = RMSNorm(f"{name}.q_a_layernorm", inputs, _NORM_EPS)
        # All heads' parts without positions, then all with.
        starts = range(0, queries, nope + spec.rope_dim)
        rows = [range(start, start + nope) for start in starts]
        rows += [part for start in starts for part in rotated_rows(start + nope)]
        self.query = Linear({stored: queries}, inputs, order=[(stored, part) for part in rows])

        width = spec.kv_rank + spec.rope_dim
        latent_rows = [range(spec.kv_rank), *rotated_rows(spec.kv_rank)]
        stored = f"{name}.kv_a_proj_with_mqa"
        self.latent = Linear(
            {stored: width},
            hidden_size,
            has_bias=has_bias,
            order=[(stored, part) for part in latent_rows],
        )
        self.latent_norm = RMSNorm(f"{name}.kv_a_layernorm", spec.kv_rank, _NORM_EPS)

        keys, values = _by_head(name, spec) if has_heads_apart else _of_whole(name, spec)
        self.of_keys = Weight(shape=(heads * spec.kv_rank, nope), role="matrices", pieces=keys)
        self.of_values = Weight(shape=(heads * value, spec.kv_rank), role="matrices", pieces=values)
        self.output = Linear({f"{name}.o_proj": hidden_size}, heads * value, has_bias=has_bias)

    def shard(self, share: Share) -> list[int]:
        """Keep a rank's heads; what is cached is every rank's. Returns the parameters that each
        rank has of the matrices.
        """
        spec, hidden_size = self.spec, self.latent.weight.shape[1]
        parts = [part.queries for part in divide_heads(spec.num_heads, spec.num_heads, share.size)]
        mine = parts[share.rank]

        def values(size: int, first: int = 0) -> range:
            """Of these heads, with so many each."""
            return range(first + mine.start * size, first + mine.stop * size)

        nope, value = spec.nope_dim, spec.value_dim
        self.query.take_outputs([values(nope), values(spec.rope_dim, spec.num_heads * nope)])
        self.of_keys.take_rows([values(spec.kv_rank)])
        self.of_values.take_rows([values(value)])
        self.output.take_inputs(values(value), share)
        self.spec = replace(spec, num_heads=len(mine))
        return [
            replace(spec, num_heads=len(part)).num_matrix_parameters(hidden_size) for part in parts
        ]

    def __call__(self, x: Array, ctx: BatchContext) -> Array:
        spec, heads = self.spec, self.spec.num_heads
        given = x
        if self.query_a is not None and self.query_norm is not None:
            given = self.query_norm(self.query_a(x))
        queries, rotated = split_columns(
            self.query(given), (heads * spec.nope_dim, heads * spec.rope_dim)
        )
        rotated = rotary(rotated.reshape(-1, heads, spec.rope_dim), self.rope.array, ctx.positions)
        latents, keys = split_columns(self.latent(x), (spec.kv_rank, spec.rope_dim))
        keys = rotary(keys.reshape(-1, 1, spec.rope_dim), self.rope.array, ctx.positions)
        cache = ctx.kv_layers[self.index]
        write_latent(self.latent_norm(latents), keys.reshape(-1, spec.rope_dim), cache, ctx)
        y = latent_attention(
            head_linear(queries.reshape(-1, heads, spec.nope_dim), self.of_keys.array),
            rotated,
            cache,
            ctx,
            softmax_scale=self.softmax_scale,
        )
        values = head_linear(y, self.of_values.array)
        return self.output(values.reshape(-1, heads * spec.value_dim))


def _of_whole(name: str, spec: LatentAttentionSpec) -> tuple[list[Piece], list[Piece]]:
    """Of each head the matrices of keys and of values, which lie one after the other."""
    nope, value = spec.nope_dim, spec.value_dim
    stored, shape = f"{name}.kv_b_proj.weight", (spec.num_heads * (nope + value), spec.kv_rank)
    starts = range(0, shape[0], nope + value)
    return (
        [
            Piece(stored, shape, is_transposed=True, columns=range(start, start + nope))
            for start in starts
        ],
        [Piece(stored, shape, rows=range(start + nope, start + nope + value)) for start in starts],
    )


def _by_head(name: str, spec: LatentAttentionSpec) -> tuple[list[Piece], list[Piece]]:
    heads = range(spec.num_heads)
    keys = (spec.num_heads, spec.kv_rank, spec.nope_dim)
    values = (spec.num_heads, spec.value_dim, spec.kv_rank)
    return (
        [Piece(f"{name}.k_b_proj.weight", keys, head) for head in heads],
        [Piece(f"{name}.v_b_proj.weight", values, head) for head in heads],
    )
