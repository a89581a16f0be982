"""The facts of a case, which rules are asked about: from its deployment and what was predicted."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.advisor.estimate import Deployed, Prediction
from octavo.advisor.facts import Facts, LayoutFacts
from octavo.advisor.layout import MOST_DEVICES_PER_NODE, is_latent, kv_copies
from octavo.advisor.memory import GIB
from octavo.advisor.promise import Promise
from octavo.core.model_spec import AttentionSpec, RecurrentSpec
from octavo.parallel.layout import refusals
from octavo.simulator.hardware import Hardware

_TRT_LLM = {"L20", "L40", "L40S", "A100"}
"""Of Ada and Ampere, those that TensorRT-LLM lists as supported; Hopper and data centre Blackwell
are, too (nvidia.github.io/TensorRT-LLM/supported-hardware.html, 2026-11).
"""
_GUESSES, _HEAD_ACCEPTANCE, _COPY_ACCEPTANCE, _HEAD_COST = 3, 0.6, 0.45, 0.05
"""Speculation's lower estimate: drafts of three; a head's guesses hold in 0.6 of cases and cost
0.05 of a step each, copied ones hold in 0.45 and cost nothing.
"""


def facts_of(
    deployed: Deployed,
    prediction: Prediction | None,
    promise: Promise | None,
    capacity: float,
    meets_slo: bool,
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
        meets_slo=meets_slo,
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


def layout_facts(deployed: Deployed) -> LayoutFacts:
    model, memory, layout = deployed.model, deployed.memory, deployed.layout
    device = deployed.hardware.device
    mixers = [layer.mixer for layer in model.spec.layers]
    grouped = next((mixer for mixer in mixers if isinstance(mixer, AttentionSpec)), None)
    latent = any(map(is_latent, mixers))
    heads = next((getattr(m, "num_heads", 0) for m in mixers if hasattr(m, "num_heads")), 0)
    reasons = refusals(model.spec, replace(layout, pp=1).in_engine, blocks=model.blocks)
    return LayoutFacts(
        tp=layout.tp,
        pp=layout.pp,
        replicas=layout.replicas,
        num_heads=heads,
        num_kv_heads=grouped.num_kv_heads if grouped is not None else 1,
        num_layers=len(mixers),
        inner_size=model.inner_size,
        quant_group=model.quant_group,
        is_mla=latent,
        link=link_of(deployed.hardware),
        devices_per_node=min(deployed.hardware.count, MOST_DEVICES_PER_NODE),
        fits_weights=memory.kv_bytes > 0 and memory.needed_bytes <= memory.device_bytes,
        weights_gib=memory.weight_bytes / GIB,
        needed_gib=memory.needed_bytes / GIB,
        usable_gib=memory.usable_bytes / GIB,
        kv_gib=max(0.0, memory.kv_bytes / GIB),
        users_longest=memory.users_longest,
        prefill_communication=_communication(deployed) if layout.tp > 1 else 0.0,
        device=device.name,
        is_gpu=not device.is_cpu,
        is_refused=bool(reasons),
        refusal="; ".join(reasons),
    )


def link_of(hardware: Hardware) -> str:
    link = hardware.device.link
    if hardware.count == 1 or link is None:
        return "none"
    return "switched" if link.is_switched else "bus"


def _communication(deployed: Deployed) -> float:
    """Share of a prompt's time: with the link, and as if it took none."""
    steps = deployed.steps
    unlinked = replace(deployed.hardware.device, link=None)
    without = deployed.but(hardware=Hardware(unlinked, deployed.hardware.count)).steps
    chunk = min(steps.prompt, deployed.settings.token_budget)
    return 1 - without.mixed(0, chunk) / steps.mixed(0, chunk)
