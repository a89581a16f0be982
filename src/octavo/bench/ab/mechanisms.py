"""Why an engine is as fast as it is: what its counters say beside the effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from octavo.bench.load.plan import PointRun
from octavo.bench.summary import server_figures


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A figure of a server. is_share: shown in per cent; otherwise with so many digits."""

    name: str
    label: str
    meaning: str
    digits: int = 0
    is_share: bool = False

    def text(self, value: float) -> str:
        return f"{value:.0%}" if self.is_share else f"{value:.{self.digits}f}"


_MECHANISMS = (
    Mechanism(
        name="acceptance",
        label="accepted",
        meaning="Drafted tokens that the model confirmed.",
        is_share=True,
    ),
    Mechanism(
        name="accepted_per_draft",
        label="accepted/draft",
        meaning="Drafted tokens that the model confirmed, of a draft.",
        digits=1,
    ),
    Mechanism(
        name="mean_batch",
        label="batch",
        meaning="Sequences that a step computes for, on average.",
        digits=1,
    ),
    Mechanism(
        name="slot_efficiency",
        label="slots",
        meaning="Of the slots that no other sequence could have, those that were computed for.",
        is_share=True,
    ),
    Mechanism(
        name="padding_share",
        label="padding",
        meaning="Positions of prompts that were computed for nothing.",
        is_share=True,
    ),
    Mechanism(
        name="kv_fill",
        label="KV fill",
        meaning="Of the KV memory that sequences hold, the part with tokens in it.",
        is_share=True,
    ),
    Mechanism(
        name="shim_share",
        label="shim",
        meaning="Of a baseline's time in `generate`, what its HTTP server took besides.",
        is_share=True,
    ),
    Mechanism(
        name="preemptions",
        label="preemptions",
        meaning="Sequences that lost their KV memory to others and were computed again.",
    ),
    Mechanism(
        name="prefix_hit_rate",
        label="prefix hits",
        meaning="Prompt tokens that were found in the prefix cache.",
        is_share=True,
    ),
    Mechanism(
        name="kv_usage_mean",
        label="KV in use",
        meaning="Of all KV memory, what sequences hold; the mean of samples.",
        is_share=True,
    ),
    Mechanism(name="steps", label="steps", meaning="Forwards of the model."),
)

MECHANISMS: Mapping[str, Mechanism] = {one.name: one for one in _MECHANISMS}
"""By name, in the order in which reports show them."""


def mechanisms_of(runs: Sequence[PointRun]) -> dict[str, float]:
    """What is known of all of these runs of one arm; the mean over them."""
    figures = [{**server_figures(run), **_of_baseline(run)} for run in runs]
    return {
        name: fmean(each[name] for each in figures)
        for name in MECHANISMS
        if figures and all(name in each for each in figures)
    }


def _of_baseline(run: PointRun) -> dict[str, float]:
    """What only hf-naive and hf-static count."""

    def grown(name: str) -> float:
        return run.counters_after.get(name, 0.0) - run.counters_before.get(name, 0.0)

    found = {}
    if "padding_tokens_total" in run.counters_after:
        padding = grown("padding_tokens_total")
        if computed := padding + grown("prompt_tokens_total"):
            found["padding_share"] = padding / computed
        if seconds := grown("generate_seconds_total"):
            found["shim_share"] = grown("shim_seconds_total") / seconds
    return found
