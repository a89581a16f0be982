"""What is decided where the settings leave it open, with the reasons that are shown at start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from octavo.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.speculative_config import SpeculativeConfig
from octavo.weights.language_model import LanguageModel

if TYPE_CHECKING:
    from octavo.executor.messages import WorkerPlan
    from octavo.kvcache.sizing import KVDecision
    from octavo.models.engine_model import EngineModel
    from octavo.ops.backend import KVShape
    from octavo.parallel.replica_shares import ReplicaShare
    from octavo.scheduler.settings import SchedulerSettings
    from octavo.weights import Checkpoint


class Decision(NamedTuple):
    """Something that was decided automatically: shown at start, with its reason."""

    what: str
    value: str
    reason: str


def memory_share(config: CacheConfig, device: str) -> float:
    """Of the free memory, 0 to 1: what the KV cache may take. device: "cpu", or a GPU."""
    if config.gpu_memory_utilization is not None:
        return config.gpu_memory_utilization
    return 0.5 if device == "cpu" else 0.9


def step_budget(config: SchedulerConfig, device: str, max_model_len: int) -> tuple[int, str]:
    """Tokens of a step at most, and why. device: "cpu", or a GPU. Raises ConfigError if whole
    prompts do not fit.
    """
    needed = 1 if config.enable_chunked_prefill else max_model_len
    if config.max_num_batched_tokens is not None:
        if config.max_num_batched_tokens < needed:
            raise ConfigError(
                f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than the "
                f"max_model_len of {max_model_len} tokens, and with --no-enable-chunked-prefill "
                f"each prompt is computed in one step; use {max_model_len} or more, or a lower "
                "--max-model-len, or leave chunked prefill on"
            )
        return config.max_num_batched_tokens, "set by --max-num-batched-tokens"
    if device == "cpu":
        budget, reason = 512, "larger steps make others wait and are no faster on CPUs"
    else:
        budget, reason = 2048, "the default for GPUs"
    if budget < needed:
        return needed, "as long as the longest prompt, since chunked prefill is off"
    return budget, reason


def reservation(config: CacheConfig, num_blocks: int, max_model_len: int) -> tuple[Decision, ...]:
    """What --kv-policy reserve-max leads to."""
    if config.kv_policy == "paged":
        return ()
    num_sequences = num_blocks // -(-max_model_len // config.block_size)
    return (
        Decision(
            "KV reservation",
            f"{max_model_len} tokens a sequence",
            f"set by --kv-policy reserve-max: memory for {num_sequences} sequences at once, and no "
            "prefix caching",
        ),
    )


def speculation(config: SpeculativeConfig) -> tuple[Decision, ...]:
    """What --speculative-config leads to."""
    if not config.methods:
        return ()
    methods = [
        f"{method['method']} up to {length}"
        for method, length in zip(config.methods, config.max_lengths, strict=True)
    ]
    what = "which, and how many," if len(methods) > 1 else "how many"
    return (
        Decision(
            "speculation",
            f"{', '.join(methods)} tokens",
            f"{what} is decided for each step, by what they gain"
            if config.is_adaptive
            else "always as many, since adaptive is false",
        ),
    )


def asked_length(config: ModelConfig, max_position: int) -> int | None:
    """Tokens that must fit; None for as many as do. Raises ConfigError."""
    if config.max_model_len == -1:
        return None
    asked = max_position if config.max_model_len is None else config.max_model_len
    if asked > max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {max_position} tokens that the model was "
            f"made for; use {max_position} or less"
        )
    return asked


def length_reason(config: ModelConfig) -> str:
    """Why the longest sequence is as long as it is."""
    if config.max_model_len is None:
        return "what the model was made for"
    return "the longest that fits" if config.max_model_len == -1 else "set by --max-model-len"


def scheduler_settings(
    config: Config,
    *,
    num_blocks: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    seconds_by_rows: tuple[tuple[int, float], ...] = (),
    num_stages: int = 1,
) -> SchedulerSettings:
    """As configured, with what the configuration leaves open and is decided by then."""
    from octavo.scheduler.settings import SchedulerSettings  # only the engine's side loads it

    speculation = config.speculation.parsed
    return SchedulerSettings(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=config.cache.block_size,
        caches_prefixes=config.cache.caches_prefixes,
        reserves_max_model_len=config.cache.kv_policy == "reserve-max",
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        batching=config.scheduler.batching,
        scheduling_policy=config.scheduler.scheduling_policy,
        draft_lengths=speculation.max_lengths,
        adapts_drafts=speculation.is_adaptive,
        seconds_by_rows=seconds_by_rows,
        num_stages=num_stages,
    )


def parts_served(checkpoint: Checkpoint) -> tuple[Decision, ...]:
    """What is not served of a model that also sees."""
    if not isinstance(checkpoint, LanguageModel):
        return ()
    reason = f"its {checkpoint.num_left_out} tensors for images are left unread"
    return (Decision("model", "text only", reason),)


def model_module(model: EngineModel) -> tuple[Decision, ...]:
    """Of a model that no family of Octavo's computes."""
    if model.module is None:
        return ()
    reason = (
        "Octavo has no family for it; a step takes up to 1.4 times as long as a family's on the "
        "torch backend, and on CPUs 1.5 to 5 times as long as a family's on the native one"
    )
    return (Decision("model", model.module, reason),)


def cache_gain(shapes: Sequence[KVShape], kv_format: KVFormat) -> str:
    """What a small format gains, as the end of a reason."""
    plain, small = (sum(map(one.token_bytes, shapes)) for one in (KVFormat("bfloat16"), kv_format))
    gain = plain / small
    return f"; {gain:.1f} times the tokens of bfloat16 in the same memory" if gain > 1 else ""


def cache_size(
    config: Config,
    plans: Sequence[WorkerPlan],
    max_position: int,
    share: ReplicaShare | None = None,
) -> KVDecision:
    """Of the KV cache: of the worker that has memory for the fewest blocks. plans: of all workers,
    of which those with the same memory share what the weights leave. share: of the machine, where
    the engine is one of several. Raises ConfigError if weights or cache don't fit.
    """
    from octavo.kvcache.sizing import decide_num_blocks

    sharing: dict[str, list[WorkerPlan]] = {}
    for plan in plans:
        sharing.setdefault(plan.memory, []).append(plan)
    decided = []
    for together in sharing.values():
        left = _left_by_weights(together, share)
        all_block_bytes = sum(plan.block_bytes for plan in together)
        decided += [
            decide_num_blocks(
                max_position,
                block_size=config.cache.block_size,
                block_bytes=plan.block_bytes,
                kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
                free_memory_bytes=left * plan.block_bytes // all_block_bytes,
                memory_share=memory_share(config.cache, plan.device),
                max_num_seqs=config.scheduler.max_num_seqs,
                max_model_len=asked_length(config.model, max_position),
            )
            for plan in together
        ]
    return min(decided, key=lambda one: one.num_blocks)


def formats_held(plans: Iterable[WorkerPlan]) -> str:
    """What the weights are stored in, what most of them are first."""
    sizes: Counter[str] = Counter()
    for plan in plans:
        sizes.update(plan.weights)
    return ", ".join(name for name, _ in sizes.most_common())


def workers(
    config: ParallelConfig, plans: Sequence[WorkerPlan], num_blocks: int
) -> tuple[Decision, ...]:
    """What each has, of a model on several processes."""
    if len(plans) == 1:
        return ()
    mib = [
        (plan.weight_bytes / 2**20, num_blocks * plan.block_bytes / 2**20, plan.num_layers)
        for plan in plans
    ]
    each = "; ".join(
        f"{weights:.1f} + {cache:.1f} MiB in {layers} layers" for weights, cache, layers in mib
    )
    tensor, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    size = f"{stages} stages of {tensor} tensor ranks" if stages > 1 else f"{tensor} tensor ranks"
    return (Decision("workers", size, f"weights + KV cache of each: {each}"),)


def _left_by_weights(plans: Sequence[WorkerPlan], share: ReplicaShare | None) -> int:
    """Free memory, or the engine's share of it, less what the weights will take. plans: of workers
    that share it.
    """
    needed_bytes = sum(plan.weight_bytes for plan in plans)
    free_bytes = min(plan.free_memory_bytes for plan in plans)
    whose = ""
    if share is not None and share.memory_bytes is not None:
        free_bytes = share.memory_bytes
        whose = f" for each of the {share.num_engines} engines"
    if needed_bytes > free_bytes:
        formats = formats_held(plans)
        remedy = "free some, or use a smaller model"
        if formats.startswith("float32"):
            remedy += ", or --dtype bfloat16, which halves it"
        elif formats.startswith(("bfloat16", "float16")) and plans[0].backend == "native":
            remedy += ", or --quantization int8, which halves it"
        if whose:
            remedy += ", or a lower --data-parallel-size"
        raise ConfigError(
            f"the weights need {needed_bytes / 2**30:.2f} GiB in {formats}, but only "
            f"{free_bytes / 2**30:.2f} GiB of {plans[0].device} memory are free{whose}; {remedy}"
        )
    return free_bytes - needed_bytes
