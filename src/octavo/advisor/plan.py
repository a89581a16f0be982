"""The plan: from a question (model, hardware, traffic, SLO) to an answer that can be checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import octavo
from octavo.advisor.bounds import Bound, bounds, forbidden
from octavo.advisor.changes import Change, nearest_changes
from octavo.advisor.choosing import (
    Candidate,
    Choices,
    candidates,
    corrected,
    first_settings,
    layout_facts,
    link_of,
    tuned,
    with_batch,
)
from octavo.advisor.engines import EngineChoice, LaunchFacts, choose_engines, general_findings
from octavo.advisor.estimate import METRICS, CostSource, Deployed, Prediction
from octavo.advisor.facts import Facts
from octavo.advisor.knobs import Chosen, chosen_knobs
from octavo.advisor.layout import MOST_DEVICES_PER_NODE, is_latent, kv_copies
from octavo.advisor.load_test import LoadTest, load_test
from octavo.advisor.memory import GIB
from octavo.advisor.model import PlannedModel
from octavo.advisor.promise import Promise
from octavo.advisor.rules import REJECT, Finding, Kind, matching
from octavo.advisor.traffic import Traffic
from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, RecurrentSpec
from octavo.simulator.hardware import Hardware

SCHEMA_VERSION = 1
_CERTAIN = 0.9
"""Share of draws from which on an answer is given without a maybe."""
_TRT_LLM = {"L20", "L40", "L40S", "A100"}
"""Of Ada and Ampere, those that TensorRT-LLM lists as supported; Hopper and data centre Blackwell
are, too (nvidia.github.io/TensorRT-LLM/supported-hardware.html, 2026-11).
"""
_GUESSES, _HEAD_ACCEPTANCE, _COPY_ACCEPTANCE, _HEAD_COST = 3, 0.6, 0.45, 0.05
"""Speculation's lower estimate: drafts of three; a head's guesses hold in 0.6 of cases and cost
0.05 of a step each, copied ones hold in 0.45 and cost nothing.
"""


class Verdict(StrEnum):
    MEETS = "meets the SLO"
    PROBABLY = "probably meets the SLO"
    PROBABLY_NOT = "probably misses the SLO"
    MISSES = "misses the SLO"
    IMPOSSIBLE = "can't meet the SLO on this hardware"
    DOES_NOT_FIT = "does not fit"
    FITS = "fits"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is made for. hardware: one, or several of which the first that does is taken.
    costs: better ones than the specification's.
    """

    model: PlannedModel
    hardware: Sequence[Hardware]
    traffic: Traffic
    promise: Promise | None = None
    choices: Choices = field(default_factory=Choices)
    costs: CostSource | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """deployed: what was chosen, corrected by its simulation. binding: what limits it, in words.
    layouts: all that were compared. others: other hardware that was asked for, with its plan's
    verdict. assumptions: what was taken for granted.
    """

    question: Question
    deployed: Deployed
    verdict: Verdict
    binding: str
    prediction: Prediction | None
    capacity: float
    replicas_needed: int
    floors: tuple[Bound, Bound, Bound]
    layouts: tuple[Candidate, ...]
    engines: tuple[EngineChoice, ...]
    engine_notes: tuple[Finding, ...]
    features: tuple[Finding, ...]
    knobs: tuple[Chosen, ...]
    pitfalls: tuple[Finding, ...]
    changes: tuple[Change, ...]
    load_test: LoadTest | None
    facts: Facts
    others: tuple[tuple[Hardware, Verdict, str], ...]
    assumptions: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return self.verdict in (Verdict.MEETS, Verdict.PROBABLY, Verdict.FITS)

    def to_json(self) -> dict[str, Any]:
        question, deployed, prediction = self.question, self.deployed, self.prediction
        settings, memory = deployed.settings, deployed.memory
        return {
            "schema_version": SCHEMA_VERSION,
            "octavo_version": octavo.__version__,
            "model": _model_json(question.model),
            "hardware": {
                "name": str(deployed.hardware),
                "device": deployed.hardware.device.name,
                "count": deployed.hardware.count,
                "sources": dict(deployed.hardware.device.sources),
            },
            "traffic": question.traffic.to_json(),
            "slo": None if question.promise is None else question.promise.slo.text,
            "verdict": self.verdict.name.lower(),
            "verdict_text": self.verdict.value,
            "binding": self.binding,
            "memory": memory.to_json(),
            "prediction": None if prediction is None else _prediction_json(prediction),
            "capacity": round(self.capacity, 3),
            "capacity_unit": "users" if question.traffic.users is not None else "requests/s",
            "replicas_needed": self.replicas_needed,
            "bounds": [bound.to_json() for bound in self.floors],
            "layout": {
                "tensor_parallel": deployed.layout.tp,
                "pipeline_parallel": deployed.layout.pp,
                "replicas": deployed.layout.replicas,
            },
            "settings": {
                "memory_share": settings.memory_share,
                "max_num_seqs": settings.num_seqs,
                "max_num_batched_tokens": settings.token_budget,
                "max_model_len": settings.max_model_len,
                "kv_cache_dtype": settings.kv.dtype,
                "block_size": settings.block_size,
            },
            "layouts": [candidate.to_json() for candidate in self.layouts],
            "engines": [choice.to_json() for choice in self.engines],
            "features": [finding.to_json() for finding in (*self.engine_notes, *self.features)],
            "knobs": [chosen.to_json() for chosen in self.knobs],
            "pitfalls": [finding.to_json() for finding in self.pitfalls],
            "changes": [change.to_json() for change in self.changes],
            "load_test": None if self.load_test is None else self.load_test.to_json(),
            "other_hardware": [
                {"hardware": str(hardware), "verdict": verdict.name.lower(), "why": why}
                for hardware, verdict, why in self.others
            ],
            "assumptions": list(self.assumptions),
        }


def make_plan(question: Question) -> Plan:
    """For the first hardware of the question that does, else for the one that comes nearest. Raises
    ConfigError for choices that can't be.
    """
    longest, asked = question.traffic.lengths.longest, question.choices.max_model_len
    if asked is not None and asked < longest:
        raise ConfigError(
            f"--max-model-len {asked} is less than the {longest:,} tokens of the longest request, "
            "which would be refused; raise it, or tell shorter lengths"
        )
    made = []
    for hardware in question.hardware:
        made.append(_plan_on(question, hardware))
        if made[-1].is_good:
            break
    if made[-1].is_good:
        best = made[-1]
    else:
        best = max(made, key=lambda plan: (plan.deployed.memory.fits, plan.capacity))
    rest = tuple(
        (plan.deployed.hardware, plan.verdict, plan.binding) for plan in made if plan is not best
    )
    promise = question.promise
    changes: list[Change] = []
    if promise is not None and not best.is_good:
        changes = nearest_changes(best.deployed, promise, best.prediction)
    return replace(best, others=rest, changes=tuple(changes))


def _plan_on(question: Question, hardware: Hardware) -> Plan:
    model, traffic, promise = question.model, question.traffic, question.promise
    choices = question.choices
    settings = first_settings(model, hardware, traffic, choices)
    ranked = candidates(model, hardware, traffic, promise, settings, choices, question.costs)
    fits = not ranked[0].is_rejected and ranked[0].deployed.memory.fits
    deployed = ranked[0].deployed
    prediction, capacity = None, 0.0
    if fits:
        deployed, prediction = _simulated(tuned(deployed, promise, choices), promise)
        ranked = corrected(ranked, deployed, promise)
        if ranked[0].layout != deployed.layout:  # with what the simulation showed, another is ahead
            other = tuned(ranked[0].deployed, promise, choices)
            deployed, prediction = _simulated(other.but(corrections={}), promise)
            ranked = corrected(ranked, deployed, promise, first=deployed.layout)
        capacity = deployed.capacity(promise)
        if promise is not None:
            deployed = with_batch(deployed, capacity, choices)
    floors = bounds(model, hardware, deployed.layout, traffic, settings.kv)
    verdict, binding = _verdict(deployed, promise, prediction, floors, fits, ranked)
    facts = _facts(deployed, prediction, promise, capacity, verdict)
    features = matching(Kind.FEATURE, facts.as_dict())
    num_queued = _num_queued(prediction, promise, deployed)
    engines = choose_engines(facts, _launch(deployed, facts, features, num_queued))
    return Plan(
        question=question,
        deployed=deployed,
        verdict=verdict,
        binding=binding,
        prediction=prediction,
        capacity=capacity,
        replicas_needed=_replicas_needed(deployed, capacity),
        floors=floors,
        layouts=tuple(ranked),
        engines=tuple(engines),
        engine_notes=tuple(general_findings(facts)),
        features=tuple(features),
        knobs=tuple(chosen_knobs(deployed, facts, features, num_queued)),
        pitfalls=tuple(matching(Kind.PITFALL, facts.as_dict())),
        changes=(),
        load_test=None
        if prediction is None
        else load_test(deployed, prediction, promise, engines[0].engine.url),
        facts=facts,
        others=(),
        assumptions=tuple(_assumptions(question, deployed, prediction)),
    )


def _simulated(deployed: Deployed, promise: Promise | None) -> tuple[Deployed, Prediction]:
    """Corrected by its simulation, and what it will do at the load."""
    wanted = set(METRICS.values())
    if promise is not None:
        wanted |= {(limit.metric, limit.q) for limit in promise.limits}
    after, outcome = deployed.simulated(tuple(wanted))
    return after, deployed.predict(promise, after, outcome)


def _verdict(
    deployed: Deployed,
    promise: Promise | None,
    prediction: Prediction | None,
    floors: tuple[Bound, ...],
    fits: bool,
    ranked: list[Candidate],
) -> tuple[Verdict, str]:
    if not fits or prediction is None:
        closest = ranked[0]
        reasons = [finding.reason for finding in closest.findings if finding.rule.effect == REJECT]
        return Verdict.DOES_NOT_FIT, f"{closest.layout}: {'; '.join(reasons)}"
    if impossible := forbidden(promise, floors):
        limit, bound = impossible[0]
        return (
            Verdict.IMPOSSIBLE,
            f"{limit}: physics allows {bound.floor_ms:,.1f} ms at best, since {bound.how}",
        )
    if promise is None:
        return Verdict.FITS, _bottleneck(deployed, prediction)
    limit, found = max(
        prediction.limits_ms.items(), key=lambda item: item[1].value / item[0].limit_ms
    )
    nearest = (
        f"{limit.metric.upper()} p{100 * limit.q:g} {found.value:,.0f} of {limit.limit_ms:g} ms; "
        f"{_bottleneck(deployed, prediction, limit.metric)}"
    )
    if not prediction.is_stable:
        return Verdict.MISSES, f"more comes than can be done, the queue grows; {nearest}"
    chance = prediction.chance or 0.0
    if prediction.meets:
        return (Verdict.MEETS if chance >= _CERTAIN else Verdict.PROBABLY), nearest
    return (Verdict.MISSES if chance <= 1 - _CERTAIN else Verdict.PROBABLY_NOT), nearest


def _bottleneck(deployed: Deployed, prediction: Prediction, metric: str = "tpot") -> str:
    """metric: of the limit that is nearest."""
    lane_batch = prediction.batch / deployed.layout.pp
    if lane_batch >= 0.98 * deployed.most_running:
        if deployed.memory.users_mean <= deployed.settings.num_seqs:
            return f"KV memory bounds the batch at {deployed.memory.users_mean:,.0f} users"
        return f"max-num-seqs bounds the batch at {deployed.settings.num_seqs}"
    if prediction.prefill_share > 0.5:
        return f"prompts take {prediction.prefill_share:.0%} of the time"
    if metric == "ttft":
        prompt = max(1.0, deployed.traffic.lengths.input_p99 * (1 - deployed.traffic.hit_rate))
        chunk = min(prompt, deployed.settings.token_budget)
        alone_ms = 1e3 * deployed.steps.mixed(0, chunk) * prompt / chunk
        return f"a prompt of {prompt:,.0f} tokens alone takes {alone_ms:,.0f} ms"
    count = max(1, round(prediction.batch))
    return f"decoding {count:,} sequence{'s' * (count > 1)} a step bounds it"


def _facts(
    deployed: Deployed,
    prediction: Prediction | None,
    promise: Promise | None,
    capacity: float,
    verdict: Verdict,
) -> Facts:
    model, hardware, traffic = deployed.model, deployed.hardware, deployed.traffic
    spec, device, memory, layout = model.spec, hardware.device, deployed.memory, deployed.layout
    of_layout = layout_facts(deployed)
    limits = {metric: promise.limit(metric) if promise else None for metric in ("ttft", "tpot")}
    batch = prediction.batch if prediction is not None else 1.0
    in_flight = _in_flight(deployed, prediction)
    demand = traffic.users if traffic.users is not None else traffic.rate
    load = (demand or 0.0) / capacity if capacity else (prediction.load if prediction else 0.0)
    mixers = [layer.mixer for layer in spec.layers]
    return Facts(
        family=spec.family,
        params=spec.num_parameters / 1e9,
        active_params=spec.num_active_parameters / 1e9,
        is_moe=model.num_experts > 0,
        num_experts=model.num_experts,
        is_mla=any(map(is_latent, mixers)),
        has_windows=any(isinstance(m, AttentionSpec) and m.window is not None for m in mixers),
        has_state=any(isinstance(m, RecurrentSpec) for m in mixers),
        num_kv_heads=of_layout.num_kv_heads,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        weight_format=model.matrices.name,
        kv_format=deployed.settings.kv.dtype,
        is_gguf=model.is_gguf,
        is_quantized_checkpoint=model.is_quantized_checkpoint,
        is_reasoning=model.is_reasoning,
        octavo_runs=model.octavo_runs(is_gpu=not device.is_cpu),
        device=device.name,
        vendor=device.vendor,
        generation=device.architecture,
        is_gpu=not device.is_cpu,
        trt_llm_lists=device.architecture in ("hopper", "blackwell")
        or device.name.split("-")[0] in _TRT_LLM,
        has_fp8="fp8" in device.flops,
        num_devices=hardware.count,
        num_nodes=math.ceil(hardware.count / MOST_DEVICES_PER_NODE),
        memory_gib=device.memory_bytes / GIB,
        link=link_of(hardware),
        input_mean=traffic.lengths.input_mean,
        input_p99=traffic.lengths.input_p99,
        output_mean=traffic.lengths.output_mean,
        longest=traffic.lengths.longest,
        users=in_flight,
        hit_rate=traffic.hit_rate,
        burst_cv=traffic.burst_cv if traffic.rate is not None else 1.0,
        repetition=traffic.repetition,
        shares_prefix=traffic.hit_rate > 0,
        ttft_limit=limits["ttft"].limit_ms if limits["ttft"] else None,
        tpot_limit=limits["tpot"].limit_ms if limits["tpot"] else None,
        tp=layout.tp,
        pp=layout.pp,
        replicas=layout.replicas,
        kv_replicas=kv_copies(of_layout.num_kv_heads, layout.tp),
        users_mean=memory.users_mean,
        users_longest=memory.users_longest,
        users_each=in_flight / layout.replicas,
        weights_gib=memory.weight_bytes / GIB,
        kv_gib=memory.kv_bytes / GIB,
        logits_gib=memory.logits_bytes / GIB,
        num_seqs=deployed.settings.num_seqs,
        token_budget=deployed.settings.token_budget,
        load=load,
        ridge_batch=_ridge(deployed),
        prefill_share=prediction.prefill_share if prediction is not None else 0.0,
        spec_gain=_spec_gain(deployed, batch) if memory.fits else 1.0,
        is_kv_bound=memory.users_mean < 1.2 * in_flight / layout.replicas,
        meets_slo=verdict in (Verdict.MEETS, Verdict.PROBABLY, Verdict.FITS),
    )


def _in_flight(deployed: Deployed, prediction: Prediction | None) -> float:
    """Requests at the peak: told, or by Little's law."""
    if deployed.traffic.users is not None:
        return deployed.traffic.users
    if prediction is None:
        return 1.0
    seconds = prediction.times_ms["e2e_p50"].value / 1e3
    return max(1.0, (deployed.traffic.rate or 0.0) * seconds)


def _ridge(deployed: Deployed) -> float:
    """Decoding sequences for which products take as long as reading their weights."""
    matrices, device = deployed.model.matrices, deployed.hardware.device
    flops_per_byte = device.peak_flops(matrices.compute) / device.read_bytes_per_second
    return flops_per_byte * matrices.bits / 8 / 2


def _spec_gain(deployed: Deployed, batch: float) -> float:
    """Tokens of a step with guesses over its seconds, against one without (arXiv 2211.17192)."""
    copies = deployed.traffic.repetition >= 0.25
    acceptance = _COPY_ACCEPTANCE if copies else _HEAD_ACCEPTANCE
    tokens = (1 - acceptance ** (_GUESSES + 1)) / (1 - acceptance)
    count = max(1, round(batch / deployed.layout.pp))
    plain = deployed.steps.decoding(count)
    guessing = 0.0 if copies else _GUESSES * _HEAD_COST * plain
    return tokens * plain / (deployed.steps.verifying(count, _GUESSES) + guessing)


def _launch(
    deployed: Deployed, facts: Facts, features: list[Finding], num_queued: int
) -> LaunchFacts:
    settings, model = deployed.settings, deployed.model
    ids = {finding.id for finding in features}
    return LaunchFacts(
        model=model.name,
        tp=facts.tp,
        pp=facts.pp,
        num_devices=facts.num_devices,
        is_gpu=facts.is_gpu,
        is_moe=facts.is_moe,
        is_mla=facts.is_mla,
        is_gguf=facts.is_gguf,
        is_quantized_checkpoint=facts.is_quantized_checkpoint,
        weight_format=facts.weight_format,
        kv_format=facts.kv_format,
        memory_share=settings.memory_share,
        max_model_len=settings.max_model_len,
        num_seqs=settings.num_seqs,
        token_budget=settings.token_budget,
        num_queued=num_queued,
        speculates="ngram" if "F2" in ids else "head" if "F3" in ids else "off",
    )


def _num_queued(prediction: Prediction | None, promise: Promise | None, deployed: Deployed) -> int:
    """Requests of one replica that are begun within the TTFT limit, at least a few."""
    limit = promise.limit("ttft") if promise is not None else None
    if limit is None or prediction is None:
        return 4 * deployed.settings.num_seqs
    each = prediction.request_rate.value / deployed.layout.replicas
    return max(8, math.ceil(each * limit.limit_ms / 1e3))


def _replicas_needed(deployed: Deployed, capacity: float) -> int:
    """Copies of the whole hardware for the load; 0 if none is enough."""
    demand = deployed.traffic.users if deployed.traffic.users is not None else deployed.traffic.rate
    return math.ceil((demand or 1.0) / capacity - 1e-9) if capacity else 0


def _assumptions(
    question: Question, deployed: Deployed, prediction: Prediction | None
) -> list[str]:
    traffic, promise = question.traffic, question.promise
    said = [*question.model.notes]
    if traffic.is_assumed:
        said.append("only mean lengths were told: uniform within ± 50 % of them")
    if promise is not None:
        said += promise.notes
    if traffic.users is not None:
        said.append("users are requests in flight; people who read between requests are more")
    if prediction is not None:
        said.append(
            f"times: {prediction.method}; costs: {prediction.provenance}, with what engines "
            "usually reach of it (prior); intervals hold 90 % of 60 draws"
        )
    if not deployed.hardware.device.is_cpu:
        said.append(
            "all GPU engines have one cost model here: they differ by less than it may be off"
        )
    return said


def _model_json(model: PlannedModel) -> dict[str, Any]:
    spec = model.spec
    return {
        "name": model.name,
        "architecture": model.architecture,
        "family": spec.family,
        "parameters": spec.num_parameters,
        "active_parameters": spec.num_active_parameters,
        "weight_format": model.matrices.name,
        "stored_format": model.stored.name,
        "stored_bytes": model.stored_bytes,
        "max_position": spec.max_position,
    }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    return {
        "times_ms": {name: value.to_json() for name, value in prediction.times_ms.items()},
        "slo_ms": {str(limit): value.to_json() for limit, value in prediction.limits_ms.items()},
        "output_rate": prediction.output_rate.to_json(),
        "request_rate": prediction.request_rate.to_json(),
        "chance": prediction.chance,
        "is_stable": prediction.is_stable,
        "load": round(prediction.load, 4),
        "prefill_share": round(prediction.prefill_share, 4),
        "batch": round(prediction.batch, 2),
        "simulated_requests": prediction.num_simulated,
        "preemptions": prediction.preemptions,
        "method": prediction.method,
        "provenance": prediction.provenance,
    }
