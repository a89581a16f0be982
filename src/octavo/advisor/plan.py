"""The plan: from a question (model, hardware, traffic, SLO) to an answer that can be checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import octavo
from octavo.advisor.bounds import Bound, bounds
from octavo.advisor.case_facts import facts_of
from octavo.advisor.changes import Change, choices_of, nearest_changes
from octavo.advisor.choosing import (
    Candidate,
    Choices,
    candidates,
    corrected,
    first_settings,
    tuned,
    with_batch,
)
from octavo.advisor.engines import EngineChoice, LaunchFacts, choose_engines, general_findings
from octavo.advisor.estimate import METRICS, NUM_DRAWS, CostSource, Deployed, Prediction
from octavo.advisor.facts import Facts
from octavo.advisor.knobs import Chosen, chosen_knobs
from octavo.advisor.load_test import LoadTest, load_test
from octavo.advisor.model import PlannedModel
from octavo.advisor.promise import Promise
from octavo.advisor.rules import Finding, Kind, matching
from octavo.advisor.traffic import Traffic
from octavo.advisor.verdict import Judgement, Verdict, judge
from octavo.core.errors import ConfigError
from octavo.simulator.hardware import Hardware

SCHEMA_VERSION = 1


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
    """deployed: what was chosen, corrected by its simulation. layouts: all that were compared.
    others: other hardware that was asked for, with what is said of it. assumptions: what was taken
    for granted.
    """

    question: Question
    deployed: Deployed
    judgement: Judgement
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
    others: tuple[tuple[Hardware, Judgement], ...]
    assumptions: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def binding(self) -> str:
        """What limits it, in words."""
        return self.judgement.binding

    @property
    def is_good(self) -> bool:
        return self.verdict.is_good

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
            "binding_provenance": self.judgement.provenance,
            "memory": memory.to_json(),
            "prediction": None if prediction is None else _prediction_json(prediction),
            "capacity": round(self.capacity, 3),
            "capacity_unit": "users" if question.traffic.users is not None else "requests/s",
            "capacity_provenance": None if prediction is None else prediction.provenance,
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
                {
                    "hardware": str(hardware),
                    "verdict": other.verdict.name.lower(),
                    "why": other.binding,
                    "provenance": other.provenance,
                }
                for hardware, other in self.others
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
    best = made[-1] if made[-1].is_good else max(made, key=_nearness)
    rest = tuple((plan.deployed.hardware, plan.judgement) for plan in made if plan is not best)
    changes: list[Change] = []
    if not best.is_good:
        changes = nearest_changes(best.deployed, question.promise, best.prediction)
    if best.verdict is Verdict.DOES_NOT_FIT:
        changes = _with_a_command(question, changes)
    return replace(best, others=rest, changes=tuple(changes))


def _nearness(plan: Plan) -> tuple[bool, float, float]:
    """To doing what is asked: where nothing fits, the least memory is missing."""
    memory = plan.deployed.memory
    return memory.fits, plan.capacity, 0.0 if memory.fits else memory.kv_bytes


def _with_a_command(question: Question, changes: list[Change]) -> list[Change]:
    """The first that holds when it is planned in full gets the command that starts it: for what
    doesn't fit there is no other.
    """
    for place, change in enumerate(changes):
        if (other := change.deployed) is None:
            continue
        asked = replace(question, model=other.model, choices=choices_of(other))
        plan = _plan_on(asked, other.hardware)
        if plan.is_good:
            first = plan.engines[0]
            started = replace(change, engine=first.engine.name, command=first.command)
            return [*changes[:place], started, *changes[place + 1 :]]
    return changes


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
    floors = bounds(deployed)
    judgement = judge(deployed, promise, prediction, floors, fits, ranked)
    facts = facts_of(deployed, prediction, promise, capacity, judgement.verdict.is_good)
    features = matching(Kind.FEATURE, facts.as_dict())
    num_queued = _num_queued(prediction, promise, deployed)
    launch = _launch(deployed, facts, features, num_queued) if fits else None
    engines = choose_engines(facts, launch)
    return Plan(
        question=question,
        deployed=deployed,
        judgement=judgement,
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


def _launch(
    deployed: Deployed, facts: Facts, features: list[Finding], num_queued: int
) -> LaunchFacts:
    settings, model, memory = deployed.settings, deployed.model, deployed.memory
    ids = {finding.id for finding in features}
    return LaunchFacts(
        model=model.name,
        tp=facts.tp,
        pp=facts.pp,
        num_devices=facts.num_devices,
        is_gpu=facts.is_gpu,
        is_moe=facts.is_moe,
        is_gguf=facts.is_gguf,
        is_quantized_checkpoint=facts.is_quantized_checkpoint,
        weight_format=facts.weight_format,
        kv_format=facts.kv_format,
        memory_share=settings.memory_share,
        static_share=memory.static_share,
        free_share=memory.free_share,
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
    longest, most = traffic.lengths.longest, deployed.settings.max_model_len
    if longest > most:
        said.append(
            f"requests of more than {most:,} tokens, the model's most, are refused; those told are "
            f"up to {longest:,}"
        )
    if traffic.is_assumed:
        said.append("only mean lengths were told: uniform within ± 50 % of them")
    if promise is not None:
        said += promise.notes
    if traffic.users is not None:
        said.append("users are requests in flight; people who read between requests are more")
    if prediction is not None:
        is_spec = prediction.costs == "specification"
        usual = ", with what engines usually reach of it (prior)" if is_spec else ""
        said.append(
            f"times: {prediction.method}; costs: {prediction.costs}{usual}; intervals hold 90 % of "
            f"{NUM_DRAWS} draws"
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
        "costs": prediction.costs,
        "provenance": prediction.provenance,
    }
