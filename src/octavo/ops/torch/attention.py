"""Attention over the paged cache.

Axes besides those of ops/array.py: n stretches of keys, L keys of a stretch, M query rows that
share a key head (tokens times H / G, padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional

from octavo import ops
from octavo.core.errors import InvariantError
from octavo.ops.batch import BatchContext
from octavo.ops.op import implements
from octavo.ops.torch.attention_plan import (
    AttentionPlan,
    ChunkPlan,
    DecodePlan,
    Keys,
    PlanKey,
    Planner,
    padded_rows,
)
from octavo.ops.torch.batch import TorchBatchContext, TorchKVLayer, TorchLatentLayer


@implements(ops.write_kv, backend="torch", array_type=torch.Tensor)
def write_kv(
    keys: torch.Tensor, values: torch.Tensor, cache: TorchKVLayer, ctx: BatchContext
) -> None:
    slots = cast(TorchBatchContext, ctx).kv_slots
    for source, target in ((keys, cache.keys), (values, cache.values)):
        target.view(-1, *target.shape[2:]).index_copy_(0, slots, source.to(target.dtype))


@implements(ops.copy_blocks, backend="torch", array_type=TorchKVLayer)
def copy_blocks(cache: TorchKVLayer, pairs: Sequence[tuple[int, int]]) -> None:
    for source, target in pairs:
        cache.keys[target] = cache.keys[source]
        cache.values[target] = cache.values[source]


@implements(ops.move_kv, backend="torch", array_type=TorchKVLayer)
def move_kv(cache: TorchKVLayer, sources: np.ndarray, targets: np.ndarray) -> None:
    _move(cache.keys, sources, targets)
    _move(cache.values, sources, targets)


def _move(array: torch.Tensor, sources: np.ndarray, targets: np.ndarray) -> None:
    source, target = (torch.from_numpy(slots).to(array.device) for slots in (sources, targets))
    tokens = array.view(-1, *array.shape[2:])
    tokens.index_copy_(0, target, tokens.index_select(0, source))


@implements(ops.write_latent, backend="torch", array_type=torch.Tensor)
def write_latent(
    latents: torch.Tensor, rotated: torch.Tensor, cache: TorchLatentLayer, ctx: BatchContext
) -> None:
    slots = cast(TorchBatchContext, ctx).kv_slots
    vectors = torch.cat([latents, rotated], dim=1).to(cache.vectors.dtype)
    cache.vectors.view(-1, vectors.shape[1]).index_copy_(0, slots, vectors)


@implements(ops.copy_blocks, backend="torch", array_type=TorchLatentLayer)
def copy_latent_blocks(cache: TorchLatentLayer, pairs: Sequence[tuple[int, int]]) -> None:
    for source, target in pairs:
        cache.vectors[target] = cache.vectors[source]


@implements(ops.move_kv, backend="torch", array_type=TorchLatentLayer)
def move_latents(cache: TorchLatentLayer, sources: np.ndarray, targets: np.ndarray) -> None:
    _move(cache.vectors, sources, targets)


class _Scoring(NamedTuple):
    """What a query's product with a key becomes before the softmax, and what else takes part in it.

    softcap: None is none. slopes, sinks: (G, H / G) float32, or None.
    """

    scale: float
    softcap: float | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    def bias(
        self, mask: torch.Tensor | None, distances: torch.Tensor | None, tokens: int
    ) -> torch.Tensor | None:
        """What is added to the scores of rows that are `tokens` query tokens' heads, padded.

        Shapes: mask (n, 1, M, L) or None, distances (n, tokens, L) from the query to the key, given
        with slopes -> (n, 1, M, L), with slopes (n, G, M, L).
        """
        if self.slopes is None or distances is None:
            return mask
        groups, sharing = self.slopes.shape
        bias = self.slopes[:, None, :, None] * distances[:, None, :, None, :]
        bias = bias.view(len(distances), groups, tokens * sharing, -1)
        filler = padded_rows(tokens * sharing) - tokens * sharing
        bias = functional.pad(bias, (0, 0, 0, filler))
        return bias if mask is None else bias + mask

    def with_sinks(self, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """output (n, G, M, E), lse (n, G, M), M being heads of whole tokens, not padded."""
        if self.sinks is None:
            return output
        sinks = self.sinks.repeat(1, lse.shape[2] // self.sinks.shape[1])
        return output / (torch.exp(sinks - lse) + 1.0).unsqueeze(-1)


class _Source(NamedTuple):
    """A layer's keys and values (N, B, G, E), or one array that is both, with buffers to copy them
    into, the dtype that they should have, and how many of a vector's values are the value.
    """

    arrays: tuple[torch.Tensor, ...]
    buffers: list[torch.Tensor]
    dtype: torch.dtype
    value_dim: int

    def gather(self, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the stretches, (n, G, L, E) each, valid until the next call."""
        copies = []
        for array, buffer in zip(self.arrays, self.buffers, strict=True):
            copy = buffer[: keys.count * keys.length]
            blocks = copy.view(-1, *array.shape[1:])
            torch.index_select(array, 0, keys.blocks, out=blocks)
            if keys.hidden is not None:
                copy.index_fill_(0, keys.hidden, 0.0)
            stretches = copy.view(keys.count, keys.length, *array.shape[2:])
            copies.append(stretches.transpose(1, 2).to(self.dtype))
        return copies[0], copies[-1][..., : self.value_dim]


@implements(ops.paged_attention, backend="torch", array_type=torch.Tensor)
def paged_attention(
    queries: torch.Tensor,
    cache: TorchKVLayer,
    ctx: BatchContext,
    *,
    softmax_scale: float,
    window: int | None,
    chunk: int | None = None,
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if not isinstance(ctx, TorchBatchContext):
        raise InvariantError("torch attention needs a context made by TorchBackend.batch_context")
    _, block_size, kv_heads, head_dim = cache.keys.shape
    key = PlanKey(
        window=window,
        chunk=chunk,
        block_size=block_size,
        queries_per_kv=queries.shape[1] // kv_heads,
        token_bytes=kv_heads * head_dim * cache.keys.element_size(),
        dtype=queries.dtype,
        device=queries.device,
        has_distances=slopes is not None,
    )
    plan = ctx.plans.get(key)
    if plan is None:
        plan = ctx.plans[key] = Planner(ctx.host, key).plan()
        shape = (plan.max_copy_tokens, kv_heads, head_dim)
        plan.buffers[:] = [cache.keys.new_empty(shape) for _ in range(2)]
    source = _Source((cache.keys, cache.values), plan.buffers, queries.dtype, head_dim)
    scoring = _Scoring(
        softmax_scale,
        softcap,
        None if slopes is None else _slopes(tuple(slopes), queries.device).view(kv_heads, -1),
        None if sinks is None else sinks.float().view(kv_heads, -1),
    )
    return _attention(queries, source, plan, scoring)


def _attention(
    queries: torch.Tensor, source: _Source, plan: AttentionPlan, scoring: _Scoring
) -> torch.Tensor:
    y = queries.new_empty(*queries.shape[:2], source.value_dim)
    if plan.decode is not None:
        y.index_copy_(0, plan.decode.rows, _decode(queries, source, plan.decode, scoring))
    for chunk in plan.chunks:
        y[chunk.start : chunk.stop] = _prefill(
            queries[chunk.start : chunk.stop], source, chunk, scoring
        )
    return y


@implements(ops.latent_attention, backend="torch", array_type=torch.Tensor)
def latent_attention(
    queries: torch.Tensor,
    rotated: torch.Tensor,
    cache: TorchLatentLayer,
    ctx: BatchContext,
    *,
    softmax_scale: float,
) -> torch.Tensor:
    """Vectors are keys of one head that all query heads share, and their first part its values."""
    if not isinstance(ctx, TorchBatchContext):
        raise InvariantError("torch attention needs a context made by TorchBackend.batch_context")
    vectors = cache.vectors
    key = PlanKey(
        window=None,
        chunk=None,
        block_size=vectors.shape[1],
        queries_per_kv=queries.shape[1],
        token_bytes=vectors.shape[2] * vectors.element_size(),
        dtype=queries.dtype,
        device=queries.device,
        is_latent=True,
    )
    plan = ctx.plans.get(key)
    if plan is None:
        plan = ctx.plans[key] = Planner(ctx.host, key).plan()
        plan.buffers[:] = [vectors.new_empty(plan.max_copy_tokens, 1, vectors.shape[2])]
    source = _Source((vectors.unsqueeze(2),), plan.buffers, queries.dtype, queries.shape[2])
    scoring = _Scoring(softmax_scale, None, None, None)
    return _attention(torch.cat([queries, rotated], dim=2), source, plan, scoring)


@lru_cache(maxsize=8)
def _slopes(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _decode(
    queries: torch.Tensor, source: _Source, plan: DecodePlan, scoring: _Scoring
) -> torch.Tensor:
    """queries (T, H, E) -> (S', H, E), the rows of `plan.rows`."""
    kv_heads, head_dim = source.arrays[0].shape[2:]
    m = queries.shape[1] // kv_heads
    q = queries.index_select(0, plan.rows).view(-1, kv_heads, m, head_dim)
    q = functional.pad(q, (0, 0, 0, padded_rows(m) - m))
    outputs, lses = [], []
    for group in plan.groups:
        k, v = source.gather(group.keys)
        bias = scoring.bias(group.mask, group.distances, 1)
        output, lse = _attend(q.index_select(0, group.sequences), k, v, bias, scoring)
        outputs.append(output)
        lses.append(lse)
    output = torch.cat(outputs).index_select(0, plan.order)
    lse = torch.cat(lses).index_select(0, plan.order)
    if len(plan.counts) > 1:
        output, *later = torch.split(output, plan.counts)
        lse, *later_lse = torch.split(lse, plan.counts)
        for part, part_lse in zip(later, later_lse, strict=True):
            _merge(output[: len(part)], lse[: len(part)], part, part_lse)
    output = scoring.with_sinks(output[:, :, :m], lse[:, :, :m])
    return output.flatten(1, 2).to(queries.dtype)


def _prefill(
    queries: torch.Tensor, source: _Source, plan: ChunkPlan, scoring: _Scoring
) -> torch.Tensor:
    """queries (T', H, E) of one sequence -> (T', H, E)."""
    kv_heads, head_dim = source.arrays[0].shape[2:]
    sharing = queries.shape[1] // kv_heads
    split = queries.view(-1, kv_heads, sharing, head_dim)
    q = split.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    value_shape = (*q.shape[:-1], source.value_dim)
    output = torch.zeros(value_shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    for keys, segments in plan.tiles:
        k, v = source.gather(keys)
        for segment in segments:
            rows = slice(segment.start * sharing, segment.stop * sharing)
            part_q = q[:, :, rows]
            m = part_q.shape[2]
            part_q = functional.pad(part_q, (0, 0, 0, padded_rows(m) - m))
            bias = scoring.bias(segment.mask, segment.distances, segment.stop - segment.start)
            part, part_lse = _attend(part_q, k, v, bias, scoring)
            part, part_lse = part[:, :, :m], part_lse[:, :, :m]
            if segment.is_first:
                output[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                _merge(output[:, :, rows], lse[:, :, rows], part, part_lse)
    output = scoring.with_sinks(output, lse)
    heads_last = output.view(kv_heads, -1, sharing, source.value_dim).transpose(0, 1)
    return heads_last.flatten(1, 2).to(queries.dtype)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scoring: _Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over these keys alone, and the logarithm of the softmax's denominator.

    Shapes: q (n, G, M, E), k, v (n, G, L, E), bias broadcast to (n, 1, M, L), or with slopes to
    (n, G, M, L) -> (n, G, M, E) in float32, (n, G, M) float32. Every row sees at least one key.
    """
    is_plain = scoring.softcap is None and scoring.slopes is None and q.shape[-1] == v.shape[-1]
    if not q.is_cpu or not is_plain:
        return attend_by_formula(q, k, v, bias, scoring)
    if bias is not None:
        bias = bias.expand(q.shape[0], 1, q.shape[2], k.shape[2])
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias, scale=scoring.scale
    )
    return output.float(), lse


def attend_by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scoring: _Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` spelled out, for any device, and with soft-capping or slopes. The denominator is
    one more column of the values, so that it is summed in the same order as they are.
    """
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if bias is not None:
        scores += bias
    top = scores.amax(dim=-1, keepdim=True)
    sums = torch.matmul(scores.sub_(top).exp_(), functional.pad(v.float(), (0, 1), value=1.0))
    total = sums[..., -1:]
    return sums[..., :-1] / total, (top + total.log()).squeeze(-1)


def _merge(
    output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Take attention over further keys into `output` and `lse`, in place.

    With weights w = exp(lse), both normalised: y = (w y + w' y') / (w + w'). Source: arXiv
    2205.14135, section 3.1. In single steps for the reason given in activations.py.
    """
    top = torch.maximum(lse, part_lse)
    weight, part_weight = torch.exp(lse - top), torch.exp(part_lse - top)
    total = weight + part_weight
    output *= (weight / total).unsqueeze(-1)
    output += part * (part_weight / total).unsqueeze(-1)
    torch.add(top, total.log(), out=lse)
