"""The attention functions that transformers' modules call in place of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from octavo.core.errors import InvariantError
from octavo.core.model_spec import AttentionSpec
from octavo.ops import BatchContext, paged_attention, write_kv

PAGED = "octavo"
"""Name of the implementation that runs, which takes no masks: a step's layout is in its context."""
TRIAL = "octavo_trial"
"""Name of the one that only looks on, without weights."""

MAX_POSITIONS = 1 << 20
"""Masks are looked at so far, and models serve no longer texts."""

STEP = "octavo_step"
"""Keyword by which a forward's `PagedStep` or `Trial` reaches every attention function."""


class Call(NamedTuple):
    """One call of attention in a forward; the i-th of every forward has the i-th layer's cache.

    spec: the cache's, whose heads are as wide as the wider of keys and values. value_dim: of the
    values.
    """

    spec: AttentionSpec
    value_dim: int


class Unsupported(Exception):  # noqa: N818 - told to the user as a refusal of the model
    """Attention that `paged_attention` can't compute; the message says what about it."""


class Trial:
    """Collects the calls of a forward on torch's meta device."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


class PagedStep:
    """A forward with its context, and how many of its calls have been computed."""

    def __init__(self, ctx: BatchContext, calls: list[Call]) -> None:
        self.ctx = ctx
        self.calls = calls
        self.num_done = 0

    def next(self) -> tuple[int, Call]:
        index = self.num_done
        self.num_done += 1
        if index >= len(self.calls):
            raise InvariantError(f"this forward calls attention more than {index} times")
        return index, self.calls[index]

    def finish(self) -> None:
        """Raises InvariantError if calls were left out: later ones had other layers' caches."""
        if self.num_done != len(self.calls):
            raise InvariantError(
                f"this forward calls attention {self.num_done} times, not {len(self.calls)} as in "
                "the trial"
            )


# What models hand on to attention and what is no part of its formula here: windows come from the
# masks, which are what eager attention goes by.
_WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "position_ids",
    "sliding_window",
    "use_cache",
}


def _paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query (1, H, T, E), key (1, G, T, E), value (1, G, T, E'), s_aux (H,) ->
    (1, T, H, E').
    """
    step: PagedStep = others[STEP]
    index, (spec, value_dim) = step.next()
    width = spec.head_dim
    q, k, v = (_wide(one, width) for one in (query, key, value))
    if q.shape[1] != spec.num_heads or k.shape[1] != spec.num_kv_heads:
        raise InvariantError(
            f"attention {index} has {q.shape[1]} and {k.shape[1]} heads, not {spec.num_heads} and "
            f"{spec.num_kv_heads} as in the trial"
        )
    cache = step.ctx.kv_layers[index]
    write_kv(k, v, cache, step.ctx)
    output: Any = paged_attention(
        q,
        cache,
        step.ctx,
        softmax_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=spec.window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None, ..., :value_dim], None


def _wide(x: torch.Tensor, width: int) -> torch.Tensor:
    """x (1, H, T, E) -> (T, H, width): zeros change no product, and are cut off of results."""
    return functional.pad(x[0].transpose(0, 1), (0, width - x.shape[3])).contiguous()


class _Mask(NamedTuple):
    """Stands for a mask in a trial: causal, with this window."""

    window: int | None


def _trial(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As `_paged`, on the meta device."""
    trial = others.pop(STEP, None)
    if not isinstance(trial, Trial):
        raise Unsupported("it hands nothing on to its attention")
    if not isinstance(attention_mask, _Mask):
        raise Unsupported("a layer attends without a causal mask, or with one of its own")
    for name, given in others.items():
        if name not in _WITHOUT_EFFECT and given is not None and given is not False:
            raise Unsupported(f"its attention has {name}, which Octavo's has not")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise Unsupported("a layer attends to other tokens than those of the step")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads % num_kv_heads or value.shape[1] != num_kv_heads:
        raise Unsupported(f"{num_heads} query heads don't share {num_kv_heads} key heads evenly")
    width = max(key.shape[3], value.shape[3])
    spec = AttentionSpec(num_heads, num_kv_heads, width, attention_mask.window)
    trial.calls.append(Call(spec, value.shape[3]))
    return query.new_empty(1, query.shape[2], num_heads, value.shape[3]), None


def _trial_mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> _Mask:
    """What transformers calls to make a mask. mask_function: of batch, head, query's and key's
    position, whether the query sees the key.
    """
    return _Mask(window_of(mask_function, min(config.max_position_embeddings, MAX_POSITIONS)))


def window_of(mask_function: Callable[..., torch.Tensor], num_positions: int) -> int | None:
    """Of a causal mask: tokens that a query sees, itself included; None is all. Some queries are
    looked at, among them neighbours, by which windows differ from chunks.
    """
    zero, keys = torch.tensor(0), torch.arange(num_positions)
    last = num_positions - 1
    looked_at = {0, min(1, last), last // 3, last // 2, (last + 1) // 2, max(last - 1, 0), last}
    window = None
    for query in sorted(looked_at):
        seen = mask_function(zero, zero, torch.tensor(query), keys).nonzero().flatten()
        count = len(seen)
        if not count or int(seen[-1]) != query or int(seen[0]) != query - count + 1:
            raise Unsupported("a token sees others than those before it")
        if count < query + 1:
            if window not in (None, count):
                raise Unsupported("it attends in chunks")
            window = count
        elif window is not None:
            raise Unsupported("it attends in chunks")
    return window


def register() -> None:
    """Let transformers' modules find both implementations, for the whole process."""
    AttentionInterface.register(PAGED, _paged)
    AttentionInterface.register(TRIAL, _trial)
    AttentionMaskInterface.register(TRIAL, _trial_mask)
