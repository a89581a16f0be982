"""What need not be tried: values that can't matter, or can't work, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from octavo.advisor.tuning.space import DEFAULT, Setting, Space
from octavo.bench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Facts:
    """About the default server and the workload. kv_tokens: that its KV cache holds. max_num_seqs,
    step_budget: its own, where they are known. mean_request_tokens, longest_request_tokens: prompt
    and output. shares_prefixes: some prompts begin alike.
    """

    kv_tokens: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    step_budget: int | None
    mean_request_tokens: float
    longest_request_tokens: int
    shares_prefixes: bool

    @classmethod
    def of(
        cls,
        workload: Workload,
        *,
        longest_request_tokens: int,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        step_budget: int | None = None,
    ) -> Facts:
        return cls(
            kv_tokens=kv_tokens,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            step_budget=step_budget,
            mean_request_tokens=sum(workload.mean_lengths()),
            longest_request_tokens=longest_request_tokens,
            shares_prefixes=workload.shares_prefixes,
        )


@dataclass(frozen=True)
class Cut:
    """Values of a knob that are not tried, and why, in a sentence."""

    knob: str
    values: tuple[Any, ...]
    why: str


def pruned(space: Space, facts: Facts) -> tuple[Space, list[Cut]]:
    """Without values that can't matter. Every knob keeps its default."""
    cuts = []
    for dimension in space.dimensions:
        why = ""
        kept: Sequence[Any] = dimension.values
        tried = [value for value in dimension.values if value is not DEFAULT]
        match dimension.name:
            case "enable_prefix_caching" if not facts.shares_prefixes:
                kept, why = (), "no two prompts of the workload begin alike"
            case "max_num_seqs" if facts.kv_tokens is not None:
                # A sequence holds half of its output on average, so twice as many may fit.
                fitting = 2 * facts.kv_tokens / facts.mean_request_tokens
                below = [value for value in tried if value <= fitting]
                kept = tried[: len(below) + 1]
                why = (
                    f"the KV cache holds {facts.kv_tokens:,} tokens, about "
                    f"{facts.kv_tokens / facts.mean_request_tokens:.0f} requests of this workload"
                )
            case "gpu_memory_utilization" if _is_roomy(facts):
                kept, why = (
                    (),
                    (
                        "the KV cache already holds all sequences that may run at once, at the "
                        "workload's longest"
                    ),
                )
            case "max_num_batched_tokens" if facts.step_budget is not None:
                kept = [value for value in tried if value != facts.step_budget]
                why = "the default's own"
            case "block_size" if facts.kv_tokens is not None:
                largest = facts.kv_tokens // 4
                kept, why = [v for v in tried if v <= largest], "the KV cache is too small"
        cut = tuple(value for value in tried if why and value not in kept)
        if cut:
            space = space.only(dimension.name, kept)
            cuts.append(Cut(dimension.name, cut, why))
    rest = Space(tuple(d for d in space.dimensions if len(d.values) > 1))
    return replace(rest, allows=partial(_is_sensible, rest, facts)), cuts


def _is_sensible(space: Space, facts: Facts, setting: Setting) -> bool:
    """Not: whole prompts that may not fit a step; more sequences than a step has tokens, which is
    the same as fewer.
    """
    values = space.named(setting)
    budget, seqs = values.get("max_num_batched_tokens"), values.get("max_num_seqs")
    if budget is None:
        return True
    if values.get("enable_chunked_prefill") is False and budget < (facts.max_model_len or 0):
        return False
    return seqs is None or seqs <= budget


def _is_roomy(facts: Facts) -> bool:
    if facts.kv_tokens is None or facts.max_num_seqs is None:
        return False
    return facts.kv_tokens >= facts.max_num_seqs * facts.longest_request_tokens
