"""What an engine would decide on hardware that isn't here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.config import CacheConfig, Config
from octavo.core.dtypes import BYTES_PER_VALUE, plain_kv_dtype
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, ModelSpec
from octavo.core.weight_format import WeightFormat
from octavo.decisions import (
    Decision,
    asked_length,
    length_reason,
    memory_share,
    scheduler_settings,
    step_budget,
)
from octavo.kvcache.sizing import KVDecision, decide_num_blocks
from octavo.parallel.layout import NO_BLOCKS, Blocks, Layout, Part, parts_of, refusals
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.cost_model import CostModel
from octavo.simulator.hardware import Device, Hardware
from octavo.simulator.roofline import Deployment, Drafter, kv_shares
from octavo.simulator.work import AttentionWork, StepWork

_GIB = 2**30
_CALIBRATED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_CALIBRATED_CONTEXT = 256


@dataclass(frozen=True, kw_only=True)
class Sized:
    """decisions: for people. block_bytes: of a KV block, on one device."""

    settings: SchedulerSettings
    decisions: tuple[Decision, ...]
    block_bytes: int


def kv_format(
    config: CacheConfig, device: Device, matrices: WeightFormat, rest: WeightFormat
) -> KVFormat:
    """Of the cache: as configured, or what the engine takes for weights of these formats, of the
    layers' matrices and of embedding and head.
    """
    if (asked := config.kv_cache_dtype) != "auto":
        return KVFormat(plain_kv_dtype(asked))
    if device.is_cpu:  # by the native backend: float32 for models that are all of it
        return KVFormat("float32" if matrices.name == rest.name == "float32" else "bfloat16")
    # By the torch backend: the dtype that the model computes in.
    return KVFormat(matrices.name if matrices.name in BYTES_PER_VALUE else "bfloat16")


def size_engine(
    config: Config,
    spec: ModelSpec,
    hardware: Hardware,
    deployment: Deployment,
    costs: CostModel,
    weight_bytes: float,
    blocks: Blocks = NO_BLOCKS,
) -> Sized:
    """As the engine does it, but for memory that only shows when a model runs: activations, and
    what a device's libraries take. weight_bytes: of the model's weights, on all devices together; a
    drafter's come on top. blocks: of the checkpoint. Raises ConfigError for a layout that the
    engine refuses, and for what doesn't fit.
    """
    layout = Layout(deployment.tensor_parallel, deployment.pipeline_parallel)
    if reasons := refusals(spec, layout, blocks=blocks):
        raise ConfigError("; ".join(reasons))
    kind = "cpu" if hardware.device.is_cpu else hardware.device.name
    if (drafter := deployment.drafter) is not None:
        weight_bytes += deployment.matrices.num_bytes(drafter.num_own_parameters)
    sized = [
        _of_part(config, spec, hardware, deployment, part, weight_bytes)
        for part in parts_of(spec, layout, blocks)
    ]
    # Of the device that has least room: all have as many blocks.
    sizing, block_bytes = min(sized, key=lambda one: one[0].num_blocks)
    budget, budget_reason = step_budget(config.scheduler, kind, sizing.max_model_len)
    settings = scheduler_settings(
        config,
        num_blocks=sizing.num_blocks,
        max_model_len=sizing.max_model_len,
        max_num_batched_tokens=budget,
        seconds_by_rows=_seconds_by_rows(config, costs),
    )
    num_tokens = sizing.num_blocks * config.cache.block_size
    return Sized(
        settings=settings,
        decisions=(
            Decision("device", str(hardware), "simulated: nothing is computed"),
            Decision(
                "weights",
                deployment.matrices.name,
                f"{weight_bytes / _GIB:.2f} GiB in all",
            ),
            Decision(
                "max_model_len", f"{sizing.max_model_len} tokens", length_reason(config.model)
            ),
            Decision("step budget", f"{budget} tokens", budget_reason),
            Decision("KV cache", f"{num_tokens} tokens", sizing.reason),
            Decision("KV cache dtype", deployment.kv.dtype, "of the simulated cache"),
            Decision("step costs", costs.provenance, "see docs/simulate.md"),
        ),
        block_bytes=block_bytes,
    )


def drafter_of(config: Config, spec: ModelSpec, read: Callable[[str], ModelSpec]) -> Drafter | None:
    """The model that guesses: that of the first method which has one. Others only look up what
    they guess, or (medusa) guess with the target's own hidden state, and count as free.

    spec: of the target. read: of a model's name.
    """
    for method in config.speculation.parsed.methods:
        match method["method"]:
            case "draft_model" if isinstance(name := method.get("model"), str):
                found = read(name)
                return Drafter(found, found.num_parameters, has_own_cache=True)
            case "layer_skip":  # the target's own layers, which fill its cache
                count = method.get("num_layers") or max(1, len(spec.layers) // 4)
                return Drafter(replace(spec, layers=spec.layers[:count]), 0, has_own_cache=False)
            case "eagle" | "eagle3":  # one layer, and the target's head
                head = replace(spec, layers=spec.layers[:1])
                return Drafter(head, head.num_matrix_parameters, has_own_cache=True)
    return None


def _of_part(
    config: Config,
    spec: ModelSpec,
    hardware: Hardware,
    deployment: Deployment,
    part: Part,
    weight_bytes: float,
) -> tuple[KVDecision, int]:
    """What a device with this part of the model would decide, and the bytes of a block there.
    weight_bytes: of all devices. Raises ConfigError.
    """
    device, ranks = hardware.device, deployment.tensor_parallel
    formats = deployment.matrices, deployment.rest
    share = part.weight_bytes(*formats) / spec.weight_bytes(*formats)
    token_bytes, state_bytes = part.kv_bytes_per_token(deployment.kv), part.spec.state_bytes
    if (drafter := deployment.drafter) is not None and drafter.has_own_cache:
        # It is on the devices of one stage, and any of them may have least room.
        token_bytes += round(_token_bytes(drafter.spec, ranks, deployment.kv))
        state_bytes += round(drafter.spec.state_bytes / ranks)
    free_bytes = device.memory_bytes - share * weight_bytes
    if free_bytes <= 0:
        count = ranks * deployment.pipeline_parallel
        raise ConfigError(
            f"the weights need {weight_bytes / _GIB:.1f} GiB in {deployment.matrices.name}, and "
            f"{count}x {device.name} has {count * device.memory_bytes / _GIB:.1f} GiB; use more "
            "devices, or weights of fewer bits"
        )
    block_bytes = config.cache.block_size * token_bytes
    decision = decide_num_blocks(
        spec.max_position,
        block_size=config.cache.block_size,
        block_bytes=max(1, block_bytes),
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        free_memory_bytes=int(free_bytes),
        memory_share=memory_share(config.cache, "cpu" if device.is_cpu else device.name),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=asked_length(config.model, spec.max_position),
        state_bytes=state_bytes,
    )
    return decision, block_bytes


def _token_bytes(spec: ModelSpec, ranks: int, kv: KVFormat) -> float:
    """Of one token's keys and values in all layers, on one device of those that share them."""
    return sum(
        layer.attention.kv_bytes_per_token(kv) / kv_shares(layer.attention, ranks)
        for layer in spec.layers
        if layer.attention is not None
    )


def _seconds_by_rows(config: Config, costs: CostModel) -> tuple[tuple[int, float], ...]:
    """What the engine would measure at start, for guesses that adapt."""
    if not config.speculation.parsed.methods:
        return ()
    return tuple((rows, costs.seconds(_decoding(rows, costs))) for rows in _CALIBRATED_ROWS)


def _decoding(rows: int, costs: CostModel) -> StepWork:
    """A step in which so many sequences get a token each."""
    return StepWork(
        num_tokens=rows,
        num_logit_rows=rows,
        num_sequences=rows,
        num_drafting=0,
        num_draft_tokens=0,
        longest_draft=0,
        num_new=0,
        attention=tuple(
            AttentionWork(
                window, rows * min(_CALIBRATED_CONTEXT, window or _CALIBRATED_CONTEXT), 0, 0, 0
            )
            for window in costs.windows
        ),
    )
