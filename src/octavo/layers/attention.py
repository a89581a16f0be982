"""Self-attention with grouped heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.model_spec import AttentionSpec
from octavo.layers.layer import Layer, Weight
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm, Norm
from octavo.layers.rope import RopeTable, Temperature
from octavo.layers.share import Share
from octavo.ops import Array, BatchContext, clamp, paged_attention, rotary, split_columns, write_kv
from octavo.parallel.division import Heads, divide_heads


@dataclass(frozen=True, slots=True)
class StoredProjections:
    """How the checkpoints of a family keep the projections of attention.

    fused: name of the one that gives queries, keys and values; None: they are q_proj, k_proj,
    v_proj. is_grouped: its rows are each key head's queries, key and value, head after head; else
    all queries, all keys, all values. output: name of the last one. is_interleaved: rotary
    embedding turns a head's dimensions 2i and 2i + 1; at load they are sorted into the halves that
    the op turns, which changes no product of a query and a key. is_transposed: as of `Linear`.
    """

    fused: str | None = None
    is_grouped: bool = False
    output: str = "o_proj"
    is_interleaved: bool = False
    is_transposed: bool = False


SEPARATE = StoredProjections()


class Attention(Layer):
    """Grouped-query attention over the paged cache. Source: arXiv 2305.13245.

    index: which of `ctx.kv_layers` is this layer's. spec: heads and window. rope: None leaves
    queries and keys as they are. softmax_scale: None is head_dim ** -0.5. query_norm, key_norm:
    over each head, or over all of them together, before the rotation. qkv_bias, output_bias:
    whether the projections have biases. columns: as of `Weight`, of query, key and value
    projections. clip: limit of what these give. softcap, slopes: as of `paged_attention`.
    has_sinks: each query head has one, named "sinks". chunk: as of `paged_attention`. temperature:
    multiplies queries. x (T, D) -> (T, D).
    """

    def __init__(
        self,
        name: str,
        index: int,
        hidden_size: int,
        spec: AttentionSpec,
        rope: RopeTable | None,
        *,
        stored: StoredProjections = SEPARATE,
        softmax_scale: float | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
        columns: tuple[int, int] | None = None,
        clip: float | None = None,
        softcap: float | None = None,
        slopes: Sequence[float] | None = None,
        has_sinks: bool = False,
        chunk: int | None = None,
        temperature: Temperature | None = None,
    ) -> None:
        self.index = index
        self.spec = spec
        self.rope = rope
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.columns: tuple[int, ...] = (queries, keys, keys)
        self.part: Heads | None = None
        outputs, order = _projections(name, spec, stored, rope)
        self.qkv = Linear(
            outputs,
            hidden_size,
            has_bias=qkv_bias,
            columns=columns,
            order=order,
            is_transposed=stored.is_transposed,
        )
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.clip = clip
        self.softcap = softcap
        self.slopes = slopes
        self.chunk = chunk
        self.temperature = temperature
        self.sinks = (
            Weight(f"{name}.sinks", shape=(spec.num_heads,), role="vector", dtype="float32")
            if has_sinks
            else None
        )
        self.output = Linear(
            {f"{name}.{stored.output}": hidden_size},
            queries,
            has_bias=output_bias,
            is_transposed=stored.is_transposed,
        )

    def shard(self, share: Share) -> list[int]:
        """Keep a rank's heads. Returns the parameters that each rank has of the matrices.

        Where all heads' queries or keys are normalised together, every rank computes all of these.
        """
        spec, hidden_size = self.spec, self.qkv.weight.shape[1]
        parts = divide_heads(spec.num_heads, spec.num_kv_heads, share.size)
        mine = self.part = parts[share.rank]
        wanted = [
            (self._all_together(self.query_norm), range(spec.num_heads), mine.queries),
            (self._all_together(self.key_norm), range(spec.num_kv_heads), mine.keys),
            (False, range(spec.num_kv_heads), mine.keys),
        ]
        outputs, begin = [], 0
        for is_whole, heads, own in wanted:
            outputs.append(self._values(heads if is_whole else own, begin))
            begin += len(heads) * spec.head_dim
        self.qkv.take_outputs(outputs)
        self.columns = tuple(map(len, outputs))
        for norm, own in ((self.query_norm, mine.queries), (self.key_norm, mine.keys)):
            if isinstance(norm, LayerNorm):
                norm.take_heads(own)
        if self.slopes is not None:
            self.slopes = self.slopes[mine.queries.start : mine.queries.stop]
        if self.sinks is not None:
            self.sinks.take_rows([mine.queries])
        self.output.take_inputs(self._values(mine.queries), share)
        self.spec = self._spec_of(mine)
        return [self._spec_of(part).num_matrix_parameters(hidden_size) for part in parts]

    def _spec_of(self, part: Heads) -> AttentionSpec:
        return replace(self.spec, num_heads=len(part.queries), num_kv_heads=len(part.keys))

    def _values(self, heads: range, first: int = 0) -> range:
        size = self.spec.head_dim
        return range(first + heads.start * size, first + heads.stop * size)

    def _all_together(self, norm: Norm | None) -> bool:
        return norm is not None and norm.size != self.spec.head_dim

    def __call__(self, x: Array, ctx: BatchContext) -> Array:
        return self.attend(self.qkv(x), ctx)

    def attend(self, qkv: Array, ctx: BatchContext) -> Array:
        """All that follows the projections, whose results are side by side in `qkv`."""
        if self.clip is not None:
            qkv = clamp(qkv, self.clip)
        q, k, v = split_columns(qkv, self.columns)
        part = self.part
        q = self._heads(q, self.spec.num_heads, self.query_norm, part and part.queries)
        k = self._heads(k, self.spec.num_kv_heads, self.key_norm, part and part.keys)
        v = v.reshape(-1, self.spec.num_kv_heads, self.spec.head_dim)
        if self.rope is not None:
            q = rotary(q, self.rope.array, ctx.positions)
            k = rotary(k, self.rope.array, ctx.positions)
        if self.temperature is not None:
            q = rotary(q, self.temperature.array, ctx.positions)
        cache = ctx.kv_layers[self.index]
        write_kv(k, v, cache, ctx)
        y = paged_attention(
            q,
            cache,
            ctx,
            softmax_scale=self.softmax_scale,
            window=self.spec.window,
            chunk=self.chunk,
            softcap=self.softcap,
            slopes=self.slopes,
            sinks=None if self.sinks is None else self.sinks.array,
        )
        return self.output(y.reshape(-1, self.spec.num_heads * self.spec.head_dim))

    def _heads(self, x: Array, count: int, norm: Norm | None, own: range | None) -> Array:
        """x (T, count E) -> (T, count, E), normalised. own: which heads these are, of more that x
        has if they are normalised together.
        """
        size = self.spec.head_dim
        if norm is None or norm.size == size:
            x = x.reshape(-1, count, size)
            return x if norm is None else norm(x)
        x = norm(x)
        if own is not None:
            first, last = own.start * size, own.stop * size
            widths = {0: first, 1: last - first, 2: norm.size - last}
            taken = [place for place, width in widths.items() if width]
            x = split_columns(x, [widths[place] for place in taken])[taken.index(1)]
        return x.reshape(-1, count, size)


def sorted_pairs(first: int, size: int, rotated: int) -> list[range]:
    """The values of a head, stored from `first` on, in which rotary embedding turns neighbours, so
    that those that it turns together are `rotated` / 2 apart.
    """
    end = first + rotated
    parts = [range(first, end, 2), range(first + 1, end, 2), range(end, first + size)]
    return [part for part in parts if part]


def _projections(
    name: str, spec: AttentionSpec, stored: StoredProjections, rope: RopeTable | None
) -> tuple[dict[str, int], list[tuple[str, range]] | None]:
    """Rows of each stored projection, and the order in which they are wanted, if it is another."""
    size, num_kv_heads = spec.head_dim, spec.num_kv_heads
    counts = (spec.num_heads, num_kv_heads, num_kv_heads)
    if stored.fused is None:
        names = [f"{name}.{part}_proj" for part in "qkv"]
        places = [(one, 0, count) for one, count in zip(names, counts, strict=True)]
        outputs = {one: count * size for one, _, count in places}
    else:
        whole = f"{name}.{stored.fused}"
        places = [(whole, sum(counts[:i]), count) for i, count in enumerate(counts)]
        outputs = {whole: sum(counts) * size}
    rotated = rope.size if stored.is_interleaved and rope is not None else 0
    if not stored.is_grouped and not rotated:
        return outputs, None
    order = []
    for kind, (tensor, first_head, count) in enumerate(places):
        if not stored.is_grouped and kind == 2:  # values come as they are stored
            order.append((tensor, range(first_head * size, (first_head + count) * size)))
            continue
        for head in range(count):
            at = first_head + head
            if stored.is_grouped:  # q ... q k v of the first key head, then of the second
                sharing = spec.num_heads // num_kv_heads
                group, within = divmod(head, sharing) if kind == 0 else (head, sharing + kind - 1)
                at = group * (sharing + 2) + within
            rows = [range(at * size, (at + 1) * size)]
            if rotated and kind < 2:
                rows = sorted_pairs(at * size, size, rotated)
            order += [(tensor, part) for part in rows]
    return outputs, order
