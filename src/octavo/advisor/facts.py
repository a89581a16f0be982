"""What rules may ask about a case: the vocabulary of their conditions and sentences."""

from __future__ import annotations

from dataclasses import dataclass, fields

from octavo.advisor.conditions import Value


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One case. Lengths in tokens, limits in milliseconds, memory in GiB (2^30 bytes) a device.

    The model. active_params: in billions, of a token; num_experts: 0 without; weight_format: bf16,
    fp8, int8, int4 or GGUF's name; is_quantized_checkpoint: stored so, not to be made so.
    has_windows: some layers see a window only. has_state: some layers keep a state of constant size
    instead of keys and values. octavo_runs: Octavo has this family, in a format that it reads.

    The hardware. vendor: nvidia, amd, intel, ...; generation: ampere, ada, hopper, blackwell, ...;
    link: between devices, "switched" (NVLink and the like), "bus" (PCIe) or "none".
    trt_llm_lists: TensorRT-LLM names its generation and class as supported.

    The traffic. users: in flight at the peak, by Little's law where a rate is given. hit_rate:
    share of prompt tokens that earlier requests have brought. burst_cv: of gaps between arrivals.
    input_p99, longest: of prompts, and of prompt and answer together. repetition: share of a prompt
    that copies itself. output_of_input: output_mean / input_mean.

    The SLO: limits, None without. The layout that was chosen: tp, pp, replicas of tp x pp devices.

    What was computed for it. kv_replicas: copies of each KV head among the tp devices. users_mean:
    that fit at mean length, users_longest at the longest, of one replica; users_each: at the peak
    that one replica has. weights_gib, kv_gib: of a device. num_seqs, token_budget: chosen.
    logits_gib: of a device, for the largest batch. load: share of the most requests that it can do.
    ridge_batch: decoding sequences from which weights no longer bound a step. prefill_share: of
    the time, spent on prompts. spec_gain: predicted speed-up of one user's decoding by n-grams or a
    draft head at the peak batch, 1 without. is_kv_bound: memory bounds the batch, not the load.
    """

    family: str
    params: float
    active_params: float
    is_moe: bool
    num_experts: int
    is_mla: bool
    has_windows: bool
    has_state: bool
    num_kv_heads: int
    vocab_size: int
    max_position: int
    weight_format: str
    kv_format: str
    is_gguf: bool
    is_quantized_checkpoint: bool
    is_reasoning: bool
    octavo_runs: bool

    device: str
    vendor: str
    generation: str
    is_gpu: bool
    trt_llm_lists: bool
    has_fp8: bool
    num_devices: int
    num_nodes: int
    memory_gib: float
    link: str

    input_mean: float
    input_p99: float
    output_mean: float
    longest: int
    users: float
    hit_rate: float
    burst_cv: float
    repetition: float
    shares_prefix: bool

    ttft_limit: float | None
    tpot_limit: float | None

    tp: int
    pp: int
    replicas: int
    kv_replicas: int
    users_mean: float
    users_longest: float
    users_each: float
    weights_gib: float
    kv_gib: float
    logits_gib: float
    num_seqs: int
    token_budget: int
    load: float
    ridge_batch: float
    prefill_share: float
    spec_gain: float
    is_kv_bound: bool
    meets_slo: bool

    def as_dict(self) -> dict[str, Value]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


NAMES = frozenset(field.name for field in fields(Facts))


@dataclass(frozen=True, kw_only=True)
class LayoutFacts:
    """One way to lay a model out on devices; memory in GiB a device.

    fits_weights: with what the engine needs besides, and some KV, or as much as was told.
    needed_gib: all of that, but for KV that wasn't told. prefill_communication: share of
    a prompt's time that is spent in all-reduces. quant_group: weights that share a scale, 0 where
    none do; inner_size: of the MLP, or of an expert. is_refused, refusal: whether Octavo can't
    divide the layers among tp devices, and why.
    """

    tp: int
    pp: int
    replicas: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    inner_size: int
    quant_group: int
    is_mla: bool
    link: str
    devices_per_node: int
    fits_weights: bool
    weights_gib: float
    needed_gib: float
    usable_gib: float
    kv_gib: float
    users_longest: float
    prefill_communication: float
    device: str
    is_gpu: bool
    is_refused: bool
    refusal: str

    def as_dict(self) -> dict[str, Value]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


LAYOUT_NAMES = frozenset(field.name for field in fields(LayoutFacts))
