"""The knobs that decide: the value each has in the plan, why, and what raising it would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from octavo.advisor.data import read_yaml
from octavo.advisor.estimate import Deployed
from octavo.advisor.facts import Facts
from octavo.advisor.rules import Finding


@dataclass(frozen=True, slots=True)
class Knob:
    """flags: by engine. ttft, tpot, throughput: what raising it does to them."""

    id: str
    name: str
    flags: Mapping[str, str]
    ttft: str
    tpot: str
    throughput: str


class _Value(NamedTuple):
    """brief: a few words; why: sentences. rule: that says so, if one does."""

    value: str
    brief: str
    why: str
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A knob with its value, and why."""

    knob: Knob
    chosen: _Value

    def to_json(self) -> dict[str, Any]:
        knob, chosen = self.knob, self.chosen
        return {
            "id": knob.id,
            "name": knob.name,
            "value": chosen.value,
            "why": f"{chosen.brief}; {chosen.why}",
            "rule": chosen.rule,
            "provenance": "prior",
            "flags": dict(knob.flags),
            "raising_it": {
                "ttft": knob.ttft,
                "tpot": knob.tpot,
                "throughput": knob.throughput,
            },
        }


@cache
def knobs() -> tuple[Knob, ...]:
    return tuple(Knob(**entry) for entry in read_yaml("knobs.yaml"))


def chosen_knobs(
    deployed: Deployed, facts: Facts, features: list[Finding], num_queued: int
) -> list[Chosen]:
    """features: findings of feature rules."""
    settings, model, memory = deployed.settings, deployed.model, deployed.memory
    by_rule = {finding.id: finding for finding in features}
    speculation = next(f for f in features if f.id in ("F2", "F3", "F4"))
    stored = "as stored" if model.is_stored_as_planned else f"made from {model.stored.name}"
    narrower = next((name for name in ("F7", "F8") if name in by_rule), None)
    budget = by_rule.get("F1")
    kv = by_rule.get("F6")
    share = (
        f"of all memory; the same is {memory.static_share:.3f} of it for weights and KV alone "
        f"(SGLang), and {memory.free_share:.3f} of what is free for KV (TensorRT-LLM)"
        if facts.is_gpu
        else "of the free memory, for KV alone"
    )
    longest = deployed.traffic.lengths.longest
    devices = f"{deployed.layout.devices} device" + "s" * (deployed.layout.devices > 1)
    values = {
        "memory_share": _Value(
            f"{settings.memory_share:.2f}", f"KV for {memory.users_mean:,.0f} users", share
        ),
        "num_seqs": _Value(
            str(settings.num_seqs),
            f"{facts.users_each:.0f} at the peak",
            f"as many as keep the SLO; memory holds {memory.users_mean:,.0f} of mean length",
        ),
        "token_budget": _Value(
            str(settings.token_budget),
            "serves the most" if budget else "the default",
            f"{budget.verdict}: {budget.reason}" if budget else "prompts are short",
            budget.id if budget else None,
        ),
        "speculation": _Value(
            {"F2": "n-grams", "F3": "a head", "F4": "off"}[speculation.id],
            f"gain {facts.spec_gain:.2f}",
            f"{speculation.verdict}: {speculation.reason}",
            speculation.id,
        ),
        "prefix_caching": _Value("on", f"{facts.hit_rate:.0%} known", by_rule["F5"].reason, "F5"),
        "weight_format": _Value(
            model.matrices.name,
            stored,
            f"{by_rule[narrower].verdict}: {by_rule[narrower].reason}" if narrower else stored,
            narrower,
        ),
        "kv_format": _Value(
            settings.kv.dtype,
            "fp8 holds twice" if kv else "memory is enough",
            f"{kv.verdict}: {kv.reason}" if kv else "KV memory does not bound the batch",
            kv.id if kv else None,
        ),
        "max_model_len": _Value(
            str(settings.max_model_len), f"longest {longest:,}", "and what a chat template adds"
        ),
        "admission": _Value(str(num_queued), "drains in time", by_rule["F10"].reason, "F10"),
        "replicas": _Value(str(deployed.layout.replicas), f"on {devices} each", "see the layout"),
    }
    return [Chosen(knob, values[knob.id]) for knob in knobs()]
