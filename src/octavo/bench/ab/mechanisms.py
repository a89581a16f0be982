"""Why an engine is as fast as it is, from what its counters grew by while a load point ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from octavo.bench.load.plan import PointRun

Counters = Callable[[str], float | None]
"""By how much the counter with this name grew; None if the server has none."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A quotient of counters, by their names without prefix and `_total`. shown: as a share (%), or
    with so many digits.
    """

    name: str
    label: str
    formula: str
    meaning: str
    value: Callable[[Counters], float | None]
    digits: int = 0
    is_share: bool = False

    def text(self, value: float) -> str:
        return f"{value:.0%}" if self.is_share else f"{value:.{self.digits}f}"


def _plain(name: str) -> Callable[[Counters], float | None]:
    return lambda grown: grown(name)


def _quotient(above: str, *below: str, offset: float = 0.0) -> Callable[[Counters], float | None]:
    """offset + above / sum(below); None without its counters, or if nothing happened."""

    def value(grown: Counters) -> float | None:
        part, parts = grown(above), [grown(name) for name in below]
        known = [value for value in parts if value is not None]
        if part is None or len(known) < len(parts) or not sum(known):
            return None
        return offset + part / sum(known)

    return value


_MECHANISMS = (
    Mechanism(
        name="steps",
        label="steps",
        formula="engine_steps",
        meaning="Forwards of the model.",
        value=_plain("engine_steps"),
    ),
    Mechanism(
        name="mean_batch",
        label="batch",
        formula="scheduled_sequences / engine_steps",
        meaning="Sequences that a step computes for, on average.",
        value=_quotient("scheduled_sequences", "engine_steps"),
        digits=1,
    ),
    Mechanism(
        name="slot_efficiency",
        label="slots used",
        formula="scheduled_sequences / taken_slots",
        meaning="Of the slots that no other sequence could have, those that were computed for.",
        value=_quotient("scheduled_sequences", "taken_slots"),
        is_share=True,
    ),
    Mechanism(
        name="padding_share",
        label="padding",
        formula="padding_tokens / (prompt_tokens + padding_tokens)",
        meaning="Positions of prompts that were computed for nothing.",
        value=_quotient("padding_tokens", "prompt_tokens", "padding_tokens"),
        is_share=True,
    ),
    Mechanism(
        name="kv_utilization",
        label="KV used",
        formula="kv_tokens / kv_capacity_tokens",
        meaning="Of the KV memory that sequences hold, the part with tokens in it.",
        value=_quotient("kv_tokens", "kv_capacity_tokens"),
        is_share=True,
    ),
    Mechanism(
        name="preemptions",
        label="preemptions",
        formula="num_preemptions",
        meaning="Sequences that lost their KV memory to others and were computed again.",
        value=_plain("num_preemptions"),
    ),
    Mechanism(
        name="hit_rate",
        label="prefix hits",
        formula="prefix_cache_hits / prefix_cache_queries",
        meaning="Prompt tokens that were found in the prefix cache.",
        value=_quotient("prefix_cache_hits", "prefix_cache_queries"),
        is_share=True,
    ),
    Mechanism(
        name="acceptance",
        label="accepted",
        formula="spec_decode_num_accepted_tokens / spec_decode_num_draft_tokens",
        meaning="Drafted tokens that the model confirmed.",
        value=_quotient("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
        is_share=True,
    ),
    Mechanism(
        name="shim_share",
        label="HTTP shim",
        formula="shim_seconds / generate_seconds",
        meaning="Of a baseline's computing time, what its HTTP server took besides.",
        value=_quotient("shim_seconds", "generate_seconds"),
        is_share=True,
    ),
)

MECHANISMS: Mapping[str, Mechanism] = {one.name: one for one in _MECHANISMS}
"""By name, in the order in which reports show them."""


def mechanisms_of(runs: Sequence[PointRun]) -> dict[str, float]:
    """What is known of these runs of one arm, taken together; per run where it is a count."""
    growths = [_growth(run) for run in runs]

    def grown(name: str) -> float | None:
        values = [growth[name] for growth in growths if name in growth]
        return fmean(values) if len(values) == len(growths) else None

    found = {one.name: one.value(grown) for one in _MECHANISMS}
    return {name: value for name, value in found.items() if value is not None}


def _growth(run: PointRun) -> dict[str, float]:
    """By name without prefix (`octavo:`, `vllm:`, `hf:`) and `_total`."""
    return {
        name.rpartition(":")[2].removesuffix("_total"): after - run.counters_before.get(name, 0.0)
        for name, after in run.counters_after.items()
    }
