"""Every knob, once: its name, default, unit, range and a sentence.

The CLI's flags, the `OCTAVO_*` environment variables, the keys of a `--config` file, `LLM(...)`'s
keywords and `docs/configuration.md` are all derived from these fields. A section goes only to the
part that it configures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from octavo.core.dtypes import (
    BYTES_PER_VALUE,
    DTYPE_ALIASES,
    KV_DTYPE_ALIASES,
    KV_DTYPES,
    QUANTIZATIONS,
    plain_kv_dtype,
)
from octavo.core.errors import ConfigError
from octavo.knob import Knob, default_of, instead_of, knob, plain_type
from octavo.speculative_config import (
    SpeculativeConfig,
    parse_speculative_config,
    speculative_config,
)

DEFAULT_MODEL = "default"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is read."""

    model: str = knob(
        DEFAULT_MODEL,
        "Model to serve: `default` (SmolLM2-135M-Instruct), a folder, a .gguf file, or a hub id "
        "org/name.",
    )
    tokenizer: str | None = knob(
        None, "Folder or hub id of another tokenizer than the model's own."
    )
    revision: str | None = knob(None, "Hub branch, tag or commit.")
    download_dir: str | None = knob(
        None, "Where hub files are kept (default: the hub library's cache, see HF_HOME)."
    )
    hf_token: str | None = knob(
        None, "Hub access token (default: HF_TOKEN or the stored login).", secret=True
    )
    dtype: str = knob(
        "auto",
        "Weights and activations; auto picks what is fast on the device. The native backend keeps "
        "weights as they are stored unless told, and always computes in float32.",
        choices=("auto", *BYTES_PER_VALUE, *DTYPE_ALIASES),
    )
    quantization: str | None = knob(
        None,
        "Quantize the weights as they are loaded (default: as they are stored). int4 and fp8 keep "
        "embedding and head in int8. Groups of 32 weights share a scale, and in int4 a zero "
        "point (-sym: none); with -g64 and -g128 larger groups do, with -channel all weights of an "
        "output: that loses more and saves nothing here.",
        choices=tuple(QUANTIZATIONS),
    )
    max_model_len: int | None = knob(
        None,
        "Longest prompt plus output (default: what the model was made for; -1: the longest that "
        "fits in memory).",
        unit="tokens",
        low=-1,
    )
    generation_config: str = knob(
        "auto",
        "Default sampling parameters: auto takes the model's generation_config.json, none "
        "ignores it.",
        choices=("auto", "none"),
    )
    override_generation_config: dict[str, Any] = knob(
        {}, "JSON of default sampling parameters that win over the model's own."
    )
    chat_template: str | None = knob(
        None, "Chat template file, or the template itself (default: the model's own)."
    )
    served_model_name: list[str] = knob(
        [],
        "Names that clients use for the model, the first in replies (default: the checkpoint's own "
        "name, and the model as given).",
    )
    max_logprobs: int = knob(
        20, "Largest `logprobs` that a request may ask for; -1: the vocabulary.", low=-1
    )
    seed: int | None = knob(
        None,
        "Makes the seeds drawn for requests that bring none repeatable (default: they aren't).",
    )

    def __post_init__(self) -> None:
        if self.max_model_len == 0:
            raise ConfigError("--max-model-len must be at least 1 token, or -1, got 0")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = knob(16, "Tokens in a KV block.", unit="tokens", low=1, high=256)
    kv_cache_memory_bytes: int | None = knob(
        None, "Memory of the KV cache (default: decided from the machine's).", unit="bytes", low=1
    )
    gpu_memory_utilization: float | None = knob(
        None,
        "Share of the device's free memory that the KV cache may take when no size is given "
        "(default: 0.9 on a GPU, 0.5 on a CPU, whose memory others use too).",
        low=0.01,
        high=1.0,
        aliases=("device-memory-utilization",),
    )
    kv_cache_dtype: str = knob(
        "auto",
        "How the KV cache stores keys and values; two formats with a comma between them, such as "
        "int8,int4, are the keys' and the values'. auto is the model's dtype, and bfloat16 for "
        "weights of less than 32 bits on the native backend.",
        choices=("auto", *KV_DTYPES, *KV_DTYPE_ALIASES),
        takes_pair=True,
    )
    enable_prefix_caching: bool | None = knob(
        None,
        "Reuse the KV blocks of prompts that begin alike (default: on, except with --kv-policy "
        "reserve-max, which has no blocks to share).",
    )
    kv_policy: str = knob(
        "paged",
        "Which KV blocks a sequence gets: those that it needs, as it grows (paged), or those of "
        "--max-model-len tokens when it starts, as in engines before paging (reserve-max: a "
        "baseline to compare with).",
        choices=("paged", "reserve-max"),
    )

    def __post_init__(self) -> None:
        plain_kv_dtype(self.kv_cache_dtype)  # a mistake is told before anything is loaded
        if self.enable_prefix_caching and self.kv_policy == "reserve-max":
            raise ConfigError(
                "--enable-prefix-caching does not go with --kv-policy reserve-max, where sequences "
                "share no memory; leave one of the two out"
            )

    @property
    def caches_prefixes(self) -> bool:
        """What enable_prefix_caching says or, if it is None, what follows from the policy."""
        if self.enable_prefix_caching is None:
            return self.kv_policy == "paged"
        return self.enable_prefix_caching


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How requests share the engine's steps."""

    max_num_seqs: int = knob(128, "Sequences that run at once.", low=1, high=65536)
    max_num_batched_tokens: int | None = knob(
        None,
        "Tokens computed in one step at most, prefill and decode together (default: 2048 on a GPU, "
        "512 on a CPU, where larger steps make others wait and are no faster; at least "
        "--max-model-len without chunked prefill).",
        low=1,
    )
    enable_chunked_prefill: bool = knob(
        True,
        "Compute long prompts in parts, beside others' answers; else each is computed whole in one "
        "step, which all others wait for.",
    )
    batching: str = knob(
        "continuous",
        "When requests start: as soon as a running one ends (continuous), or when the whole batch "
        "has ended (static: a baseline to compare with).",
        choices=("continuous", "static"),
    )
    max_num_queued_reqs: int | None = knob(
        None, "Requests that may wait; one more is refused with 503 (default: no limit).", low=0
    )
    scheduling_policy: str = knob(
        "fcfs",
        "Order of service: first come first served, or by each request's `priority` (lower first), "
        "where a waiting request preempts running ones of lower priority.",
        choices=("fcfs", "priority"),
    )
    record_steps: str | None = knob(
        None,
        "File that every step is written to: what the scheduler was told and what it decided, with "
        "times, for `octavo simulate --recorded`. It has the prompts, as token ids, for its owner "
        "alone to read. A file that exists is not overwritten.",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Tokens that are guessed, and verified without changing what is generated."""

    speculative_config: str = knob(
        "off",
        "Guess tokens and verify several at once; the text stays the same. ngram or suffix (look "
        "them up in what was written before), draft_model, layer_skip, medusa, eagle or eagle3, as "
        'JSON with vLLM\'s keys, e.g. {"method": "ngram", "num_speculative_tokens": 8}, or short: '
        "ngram:8; several are joined by +. How many are guessed, up to that number, is decided for "
        "each step by what it gains.",
        aliases=("speculative",),
        takes_json=True,
    )

    @property
    def parsed(self) -> SpeculativeConfig:
        """Raises ConfigError for what doesn't depend on the model."""
        return speculative_config(parse_speculative_config(self.speculative_config))

    def __post_init__(self) -> None:
        self.parsed  # noqa: B018  # a mistake is told before anything is loaded


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """What computes."""

    backend: str = knob(
        "auto",
        "Implementation of the op set; auto is native on CPUs and torch on GPUs.",
        choices=("auto", "native", "torch"),
    )
    device: str = knob("auto", "Device to run on.", choices=("auto", "cpu", "cuda"))
    threads: int | None = knob(
        None,
        "Threads that compute (default: one for each CPU that the process may use).",
        low=1,
    )
    simulate: str | None = knob(
        None,
        "Compute nothing, and answer with made-up tokens at the pace that this hardware would "
        "have: H100, L4:2, ... The model's configuration and tokenizer are read, its weights not.",
    )
    kernels: dict[str, str] = knob(
        {}, 'JSON of op to implementation, e.g. {"linear": "reference"}; see `octavo kernels`.'
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many processes, on how many machines, compute one model; and what if one dies."""

    tensor_parallel_size: int = knob(
        1,
        "Processes that share each layer: its heads, its MLPs and the vocabulary. Weights and KV "
        "cache of each shrink, and all wait for each other twice a layer.",
        low=1,
        aliases=("tp",),
    )
    pipeline_parallel_size: int = knob(
        1,
        "Parts that the layers are divided into, one after another, each on processes of its own. "
        "Little is sent between them; all are busy only while there are as many batches.",
        low=1,
        aliases=("pp",),
    )
    data_parallel_size: int = knob(
        1,
        "Complete copies of the model behind one endpoint; a request goes to the copy that knows "
        "its beginning, or has least to do.",
        low=1,
        aliases=("dp",),
    )
    distributed_executor_backend: str = knob(
        "auto",
        "What starts the processes: Octavo on this machine (mp), or a Ray cluster (ray). auto is "
        "mp; see also --nnodes.",
        choices=("auto", "mp", "ray"),
    )
    nnodes: int = knob(
        1,
        "Machines that compute one model, each started with the same command but its --node-rank.",
        low=1,
    )
    node_rank: int = knob(
        0, "Which of the --nnodes machines this is; 0 is the one that clients talk to.", low=0
    )
    master_addr: str = knob("127.0.0.1", "Address of machine 0, by which the others find it.")
    master_port: int = knob(29501, "Port there.", low=1, high=65535)
    cluster_key: str | None = knob(
        None,
        "Secret by which the machines know each other; the same for all. Without one, whoever "
        "reaches --master-port while Octavo starts could take a part.",
        secret=True,
    )
    restart_workers: bool = knob(
        False,
        "When a process that computes has died, start the model again and go on with the requests; "
        "else they fail and the server ends.",
    )
    worker_timeout: float = knob(
        10.0,
        "Silence after which a process that computes counts as dead.",
        unit="seconds",
        low=0.1,
    )

    @property
    def num_workers(self) -> int:
        """Processes that compute one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_workers(self) -> bool:
        """Whether a model is computed by other processes than its engine's."""
        is_elsewhere = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return self.num_workers > 1 or is_elsewhere


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = knob("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = knob(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    api_key: list[str] = knob([], "Keys that clients must send as a bearer token.", secret=True)
    allowed_origins: list[str] = knob([], "CORS origins; none by default.")
    root_path: str = knob("", "Path prefix when a proxy strips one.")
    max_body_bytes: int = knob(32 * 2**20, "Largest request body.", unit="bytes", low=1024)
    ignore_unknown_fields: bool = knob(
        False, "Accept unknown request fields, with a warning header, instead of refusing them."
    )
    enable_live_limits: bool = knob(
        False,
        "Let POST /limits lower --max-num-seqs and --max-num-batched-tokens while the server runs, "
        "and raise them again up to what it was started with, as `octavo tune` does; with the API "
        "key if there is one.",
    )
    metrics_prefix: str = knob(
        "octavo", "Prefix of the names in /metrics; `vllm` suits its dashboards."
    )
    enable_per_request_metrics: bool = knob(
        False,
        "Say in each reply of one sequence how it ran: `metrics`, with times, tokens/s and what "
        "became of guessed tokens. A stream has it in the chunk with the usage.",
    )
    shutdown_timeout: float = knob(
        30.0, "Time that running requests get to end on SIGTERM.", unit="seconds", low=0
    )
    sse_keep_alive_interval: float = knob(
        15.0, "Silence after which a stream sends a comment line; 0: never.", unit="seconds", low=0
    )
    log_level: str = knob("info", "What is logged.", choices=("debug", "info", "warning", "error"))
    log_stats_interval: float = knob(
        10.0, "Period of the engine's log line; 0: never.", unit="seconds", low=0
    )
    access_log: bool = knob(False, "Log a line for each HTTP request.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections. Build one with `Config.from_flat`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Config:
        """Sections from one mapping of knob name to value, checked.

        Raises ConfigError for an unknown name (with what there is instead), a wrong type or a value
        out of range.
        """
        known = {spec.name: spec for spec in knobs()}
        chosen: dict[str, dict[str, Any]] = {f.name: {} for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}{instead_of(name, known)}")
            spec = known[name]
            chosen[spec.section][name] = spec.check(value)
        return cls(**{s: _SECTIONS[s](**section) for s, section in chosen.items()})

    def to_flat(self) -> dict[str, Any]:
        """The inverse of `from_flat`."""
        return {spec.name: getattr(getattr(self, spec.section), spec.name) for spec in knobs()}


_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculation": SpeculationConfig,
    "backend": BackendConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
}


@cache
def knobs() -> tuple[Knob, ...]:
    """Every knob of every section, in the order in which they are declared."""
    found = []
    for section, cls in _SECTIONS.items():
        hints = get_type_hints(cls)
        for spec in fields(cls):
            kind, optional = plain_type(hints[spec.name])
            found.append(
                Knob(
                    section=section,
                    name=spec.name,
                    kind=kind,
                    optional=optional,
                    default=default_of(spec),
                    **spec.metadata,
                )
            )
    return tuple(found)
