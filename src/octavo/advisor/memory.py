"""The memory of a device, line by line: what is there, what the engine takes, and how many users
the rest holds.

The known mistakes of such arithmetic are tests: tests/unit/advisor/test_memory.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from octavo.advisor.layout import Layout, Settings, stage_share
from octavo.advisor.model import PlannedModel
from octavo.advisor.traffic import Lengths
from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, KVFormat, ModelSpec
from octavo.kvcache.sizing import decide_num_blocks
from octavo.simulator.cost_model import Provenance
from octavo.simulator.hardware import Hardware
from octavo.simulator.roofline import kv_shares

GIB = 2**30
_CONTEXT_BYTES = int(0.6 * GIB)
_GRAPH_BYTES = int(0.7 * GIB)
_COLLECTIVES_BYTES = int(0.36 * GIB)
"""What CUDA and its libraries take, captured steps, and NCCL's buffers (342 to 392 MB in NVIDIA's
aiconfigurator): usual sizes.
"""
_LANES = 16
_Z = 1.645
"""So that the users that fit, with lengths as they happen to be, fit 95 % of the time."""


@dataclass(frozen=True, slots=True)
class Line:
    """value: in bytes, tokens or users, as the unit says. how: the arithmetic, in words."""

    label: str
    value: float
    unit: str
    how: str
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "value": round(self.value, 2),
            "unit": self.unit,
            "how": self.how,
            "provenance": self.provenance,
        }


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one device, but for users and tokens, which are of one replica.

    device_bytes: all memory; usable_bytes: that the engine may take; other_bytes: that it holds
    besides KV, weight_bytes among them. kv_bytes: what is left for KV, may be negative.
    kv_bytes_per_token: on one device. num_blocks: of the KV cache. users_mean: that fit at the
    context that sequences have on average; users_safe: with a margin for their scatter;
    users_longest: at the longest request, which is what engines print as "maximum concurrency".
    """

    lines: tuple[Line, ...]
    device_bytes: int
    usable_bytes: float
    other_bytes: float
    weight_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    num_blocks: int
    num_tokens: int
    users_mean: float
    users_safe: float
    users_longest: float
    logits_bytes: float

    @property
    def fits(self) -> bool:
        """Weights, and a request of the longest length, without more KV told than there is."""
        return self.needed_bytes <= self.device_bytes and self.users_longest >= 1

    @property
    def needed_bytes(self) -> float:
        return self.other_bytes + max(0.0, self.kv_bytes)

    @property
    def provenance(self) -> Provenance:
        """Of weights and free memory together."""
        is_measured = any(line.provenance == "measured" for line in self.lines)
        return "measured" if is_measured else "specification"

    @property
    def static_share(self) -> float:
        """Weights and KV, of all memory: what SGLang calls static."""
        return (self.weight_bytes + self.kv_bytes) / self.device_bytes

    @property
    def free_share(self) -> float:
        """KV, of what all else that the engine holds leaves free: as TensorRT-LLM counts."""
        return self.kv_bytes / (self.device_bytes - self.other_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "lines": [line.to_json() for line in self.lines],
            "fits": self.fits,
            "weight_bytes": round(self.weight_bytes),
            "kv_bytes": round(self.kv_bytes),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "num_blocks": self.num_blocks,
            "num_tokens": self.num_tokens,
            "users_mean": round(self.users_mean, 1),
            "users_safe": round(self.users_safe, 1),
            "users_longest": round(self.users_longest, 2),
        }


def account(
    model: PlannedModel, hardware: Hardware, layout: Layout, settings: Settings, lengths: Lengths
) -> Memory:
    """Of the fullest device. Nothing is refused: what doesn't fit shows in the lines."""
    device = hardware.device
    weights = _weight_lines(model, layout)
    weight_bytes = sum(line.value for line in weights)
    logits_bytes = 4.0 * settings.num_seqs * model.spec.vocab_size / layout.tp
    if device.is_cpu:
        total = Line(
            "free memory", device.memory_bytes, "bytes", "of this machine, now", "measured"
        )
        lines = [total, *weights]
        left = device.memory_bytes - weight_bytes
        usable, other = float(device.memory_bytes), weight_bytes
        kv_bytes = left * settings.memory_share
        share = Line(
            "left to others",
            left - kv_bytes,
            "bytes",
            f"{1 - settings.memory_share:.0%} of what the weights leave",
            "prior",
        )
        lines.append(share)
    else:
        usable = device.memory_bytes * settings.memory_share
        lines = [
            Line("device memory", device.memory_bytes, "bytes", str(device.name), "specification"),
            Line(
                "not for the engine",
                device.memory_bytes - usable,
                "bytes",
                f"memory share {settings.memory_share:.2f} of all memory",
                "prior",
            ),
            *weights,
            *_overhead(model, layout, settings, logits_bytes),
        ]
        other = sum(line.value for line in lines[2:])
        kv_bytes = usable - other
    how = "the rest"
    if settings.kv_memory_bytes is not None:
        kv_bytes, how = float(settings.kv_memory_bytes), "as told, whatever the rest is"
    lines.append(Line("left for KV", kv_bytes, "bytes", how, "specification"))
    return _with_kv(model, hardware, layout, settings, lengths, _Parts(
        lines, usable, other, weight_bytes, kv_bytes, logits_bytes
    ))  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Parts:
    lines: list[Line]
    usable: float
    other: float
    weight_bytes: float
    kv_bytes: float
    logits_bytes: float


def _with_kv(
    model: PlannedModel,
    hardware: Hardware,
    layout: Layout,
    settings: Settings,
    lengths: Lengths,
    parts: _Parts,
) -> Memory:
    spec, kv = model.spec, settings.kv
    fraction = _device_share(spec, kv, layout)
    if hardware.device.is_cpu:
        fraction *= _padding(spec, kv)
    per_token = spec.kv_bytes_per_token(kv) * fraction
    block_bytes = max(1, round(per_token * settings.block_size))
    state_bytes = spec.state_bytes * stage_share(len(spec.layers), layout.pp) / layout.tp
    room = max(0.0, parts.kv_bytes)

    def users(tokens: float) -> float:
        """That `room` holds."""
        kept = spec.kv_bytes_per_sequence(
            max(1, round(tokens)),
            kv,
            block_size=settings.block_size,
            frees_windows=settings.frees_windows,
        )
        each = fraction * (kept - spec.state_bytes) + state_bytes
        if not room:
            return 0.0
        return room / each if each else math.inf

    # The states of all that run at once lie beside the blocks.
    states = state_bytes * min(settings.num_seqs, users(lengths.context))
    num_blocks = int((room - states) // block_bytes) if per_token else 0
    how = "blocks of {} tokens"
    if hardware.device.is_cpu and per_token and room:
        num_blocks, how = _octavo_blocks(
            hardware, settings, parts, block_bytes, round(state_bytes), num_blocks
        )
        room = num_blocks * block_bytes + states
    num_tokens = num_blocks * settings.block_size

    mean, longest = users(lengths.context), users(lengths.longest)
    safe = mean
    for _ in range(4):
        spread = _Z * lengths.context_sd / math.sqrt(max(1.0, safe))
        safe = users(lengths.context + spread)
    freed = " (windows freed)" if settings.frees_windows and any(spec.windows) else ""
    lines = [
        *parts.lines,
        Line("KV of a token", per_token, "bytes", _kv_in_words(spec, kv, layout), "specification"),
        Line("KV tokens", num_tokens, "tokens", how.format(settings.block_size), "specification"),
        Line(
            "users at mean length",
            mean,
            "users",
            f"each holds {lengths.context:,.0f} tokens on average, weighted by its life{freed}; "
            f"{safe:,.0f} with a margin for scatter",
            "specification",
        ),
        Line(
            "users at the longest",
            longest,
            "users",
            f"each {lengths.longest:,} tokens; engines log this as maximum concurrency{freed}",
            "specification",
        ),
    ]
    return Memory(
        lines=tuple(lines),
        device_bytes=hardware.device.memory_bytes,
        usable_bytes=parts.usable,
        other_bytes=parts.other,
        weight_bytes=parts.weight_bytes,
        kv_bytes=parts.kv_bytes,
        kv_bytes_per_token=per_token,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        users_mean=mean,
        users_safe=safe,
        users_longest=longest,
        logits_bytes=parts.logits_bytes,
    )


def _octavo_blocks(
    hardware: Hardware,
    settings: Settings,
    parts: _Parts,
    block_bytes: int,
    state_bytes: int,
    num_blocks: int,
) -> tuple[int, str]:
    """As the engine itself sizes its cache; what it would refuse is left as it is."""
    try:
        decision = decide_num_blocks(
            settings.max_model_len,
            block_size=settings.block_size,
            block_bytes=block_bytes,
            kv_cache_memory_bytes=settings.kv_memory_bytes,
            free_memory_bytes=int(hardware.device.memory_bytes - parts.weight_bytes),
            memory_share=settings.memory_share,
            max_num_seqs=settings.num_seqs,
            max_model_len=settings.max_model_len,
            state_bytes=state_bytes,
        )
    except ConfigError:
        return num_blocks, "blocks of {} tokens; too few for the longest request"
    return decision.num_blocks, "blocks of {} tokens, no more than all sequences can fill"


def _weight_lines(model: PlannedModel, layout: Layout) -> list[Line]:
    """Of the fullest device. Tables are divided by tensor parallelism, and lie in the first and the
    last stage of a pipeline; experts are divided as well, whoever has them.
    """
    spec = model.spec
    stage = stage_share(len(spec.layers), layout.pp)
    matrices = model.matrices.num_bytes(spec.num_matrix_parameters)
    total = model.weight_bytes
    is_measured = model.stored_bytes is not None and model.is_stored_as_planned
    provenance: Provenance = "measured" if is_measured else "specification"
    if is_measured:
        expected = spec.weight_bytes(model.matrices, model.rest)
        matrices *= total / expected
    rest = total - matrices
    if layout.pp > 1 and not spec.ties_embeddings:
        rest /= 2
    part = f"/ {layout.devices} devices" if layout.devices > 1 else ""
    count = f"{spec.num_matrix_parameters / 1e9:.2f} billion in {model.matrices.name}"
    bits = f"{model.matrices.bits:.2f} bits each with scales"
    return [
        Line(
            "weights of the layers",
            matrices * stage / layout.tp,
            "bytes",
            f"{count}, {bits} {part}".rstrip(),
            provenance,
        ),
        Line(
            "embedding, head, norms",
            rest / layout.tp,
            "bytes",
            f"{spec.vocab_size:,} x {spec.hidden_size:,} in {model.rest.name}, "
            + ("tied" if spec.ties_embeddings else "twice"),
            provenance,
        ),
    ]


def _overhead(
    model: PlannedModel, layout: Layout, settings: Settings, logits_bytes: float
) -> list[Line]:
    spec = model.spec
    inner = max(model.inner_size, 1)
    activations = settings.token_budget * (4.0 * inner / layout.tp + 12.0 * spec.hidden_size)
    lines = [
        Line(
            "activations",
            activations,
            "bytes",
            f"{settings.token_budget:,} tokens a step x (2 x {inner:,} + 6 x {spec.hidden_size:,}) "
            "in 16 bits",
            "prior",
        ),
        Line(
            "logits",
            logits_bytes,
            "bytes",
            f"{settings.num_seqs} sequences x {spec.vocab_size:,} in float32",
            "specification",
        ),
        Line(
            "CUDA, graphs",
            _CONTEXT_BYTES + _GRAPH_BYTES,
            "bytes",
            "context and libraries 0.6, captured steps 0.7 GiB",
            "prior",
        ),
    ]
    if layout.devices > 1:
        lines.append(
            Line("collectives", _COLLECTIVES_BYTES, "bytes", "NCCL's or RCCL's buffers", "prior")
        )
    return lines


def _device_share(spec: ModelSpec, kv: KVFormat, layout: Layout) -> float:
    """Of a sequence's KV, what the fullest device keeps: KV heads are divided as far as they go,
    and copied beyond; latent vectors are copied; stages have the KV of their own layers.
    """
    whole = kept = 0.0
    for layer in spec.layers:
        if (attention := layer.attention) is not None:
            size = attention.kv_bytes_per_token(kv)
            whole += size
            kept += size / kv_shares(attention, layout.tp)
    return (kept / whole if whole else 1 / layout.tp) * stage_share(len(spec.layers), layout.pp)


def _padding(spec: ModelSpec, kv: KVFormat) -> float:
    """Of Octavo's cache on CPUs: values of a head are kept in sixteens (csrc/formats.h)."""
    plain = padded = 0
    for layer in spec.layers:
        if isinstance(layer.attention, AttentionSpec):
            size, heads = layer.attention.head_dim, layer.attention.num_kv_heads
            plain += heads * kv.bytes_per_pair(size)
            wider = kv.value_bytes(_LANES * math.ceil(size / _LANES))
            padded += heads * (kv.key_bytes(size) + wider)
    return padded / plain if plain else 1.0


def _kv_in_words(spec: ModelSpec, kv: KVFormat, layout: Layout) -> str:
    """2 x 32 layers x 8 heads x 128 x 2 bytes"""
    keeping = [layer.attention for layer in spec.layers if layer.attention is not None]
    kinds = dict.fromkeys(keeping)
    has_heads = any(hasattr(attention, "num_kv_heads") for attention in kinds)
    divided = layout if has_heads else Layout(1, layout.pp)
    devices = f" over {divided}" if divided.devices > 1 else ""
    copied = f", whole on each of {layout.tp}" if layout.tp > 1 else ""
    if not kinds:
        return "no layer keeps keys and values"
    parts = []
    for attention in list(kinds)[:2]:
        count = keeping.count(attention)
        window = "" if attention.window is None else f" of window {attention.window}"
        width = attention.kv_bytes_per_token(kv)
        heads = getattr(attention, "num_kv_heads", None)
        if heads is None:
            parts.append(f"{count} layers x {width:,} bytes (one latent vector{copied}){window}")
        else:
            size = kv.key_bytes(attention.head_dim)  # type: ignore[union-attr]
            parts.append(f"2 x {count} layers{window} x {heads} heads x {size:,} bytes")
    state = f", and {spec.state_bytes / GIB:.3f} GiB a sequence" if spec.state_bytes else ""
    return " + ".join(parts) + devices + state


def kv_format(name: str) -> KVFormat:
    """Raises ConfigError."""
    aliases = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8"}
    plain = aliases.get(name, name)
    if plain not in ("float32", "bfloat16", "float16", "int8", "fp8"):
        raise ConfigError(
            f"--kv-cache-dtype must be bfloat16, float16, float32, fp8 or int8, got {name!r}"
        )
    return KVFormat(plain)
