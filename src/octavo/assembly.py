"""From a configuration to running parts. The one place that knows them all; the parts don't know
each other.

The engine side (weights, backend, runner, scheduler) is built by `build_engine`, in whichever
process the engine runs; the text side (tokenizer, chat template, defaults) by `load_text` and
`served_model`, where requests arrive.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import CacheConfig, Config, ModelConfig
from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.decisions import (
    Decision,
    cache_gain,
    cache_size,
    formats_held,
    length_reason,
    model_module,
    parts_served,
    reservation,
    scheduler_settings,
    step_budget,
    workers,
)
from octavo.decisions import speculation as speculation_decisions
from octavo.logs import log_to_stderr
from octavo.text.generation_config import GENERATION_KEYS, default_sampling, eos_token_ids
from octavo.text.served_model import ServedModel
from octavo.weights import Checkpoint, TextAssets
from octavo.weights import open_model as open_model  # what others open models with

if TYPE_CHECKING:
    from octavo.engine.child import EngineChild
    from octavo.engine.client import EngineClient
    from octavo.engine.loop import EngineLoop
    from octavo.engine.recording import RecordedScheduler
    from octavo.executor.base import Crew, Executor, Probe, Progress
    from octavo.executor.messages import WorkerPlan
    from octavo.models.causal_lm import CausalLM
    from octavo.models.engine_model import EngineModel
    from octavo.parallel.replica_shares import ReplicaShare
    from octavo.scheduler.scheduler import Scheduler
    from octavo.scheduler.settings import SchedulerSettings
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")

_ENGINE_MODULES = (
    "octavo.executor.local",
    "octavo.kvcache.sizing",
    "octavo.models.loader",
    "octavo.models.registry",
    "octavo.scheduler.settings",
)

# Steps of so many rows are timed at start, to know what verifying costs: about 0.2 s.
_CALIBRATED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class EngineFacts:
    """What the rest of the program wants to know of a built engine.

    max_model_len: in tokens, after sizing. num_blocks, block_bytes: of the KV cache. kernels: op to
    implementation. fingerprint: of weights, configuration and kernels.
    """

    max_model_len: int
    num_blocks: int
    block_bytes: int
    kernels: Mapping[str, str]
    fingerprint: str
    decisions: tuple[Decision, ...]


# --- the engine's side ------------------------------------------------------------------------


def unloaded_model(checkpoint: Checkpoint) -> CausalLM:
    """The model without its weights: what it consists of, and in which shapes. Raises ConfigError
    for a model that is not built yet.
    """
    from octavo.models.registry import build_model

    return build_model(checkpoint.config)


def max_position(checkpoint: Checkpoint) -> int:
    """Tokens that the model was made for, whoever computes it. Raises ConfigError for a model that
    can't be served.
    """
    from octavo.models.registry import engine_model

    return engine_model(checkpoint.config).max_position


def build_engine(
    config: Config,
    vocab_size: int,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    probe: Probe | None = None,
    share: ReplicaShare | None = None,
) -> tuple[EngineLoop, EngineFacts]:
    """Load the model and put an engine around it. Raises ConfigError, for all that doesn't fit
    into memory before any weight is read.

    vocab_size: token ids that the tokenizer knows; others are never generated. checkpoint: if the
    model is open already. probe: looks on while the engine works. share: what it may take, where it
    is one of several.
    """
    if config.parallel.data_parallel_size > 1 and share is None:
        raise ConfigError(
            f"--data-parallel-size {config.parallel.data_parallel_size}: this runs one engine; "
            "leave it out"
        )
    checkpoint = checkpoint or open_model(config.model)
    if config.backend.simulate is not None:
        return _simulated_engine(config, checkpoint, vocab_size, probe)
    from octavo.models.registry import engine_model

    model = engine_model(checkpoint.config)
    replica = 0 if share is None else share.replica
    crew = _crew(config, vocab_size, checkpoint, model, replica, probe)
    try:
        return _engine_of(crew, config, checkpoint, model, progress, share)
    except BaseException:
        crew.close()
        raise


def _engine_of(
    crew: Crew,
    config: Config,
    checkpoint: Checkpoint,
    model: EngineModel,
    progress: Progress | None,
    share: ReplicaShare | None,
) -> tuple[EngineLoop, EngineFacts]:
    """What `build_engine` makes, of those who compute the model."""
    from octavo.executor.messages import Sizes

    plans = crew.plans
    first = plans[0]
    sizing = cache_size(config, plans, model.max_position, share)
    budget, budget_reason = step_budget(config.scheduler, first.device, sizing.max_model_len)
    guesses = config.speculation.parsed
    counts = _CALIBRATED_ROWS if guesses.methods and guesses.is_adaptive else ()
    sizes = Sizes(
        sizing.num_blocks,
        sizing.max_model_len,
        taps=plans[-1].taps,
        calibrated_rows=tuple(count for count in counts if count <= budget),
    )
    executor, seconds_by_rows = crew.load(sizes, progress)
    settings = scheduler_settings(
        config,
        num_blocks=executor.num_blocks,
        max_model_len=sizing.max_model_len,
        max_num_batched_tokens=budget,
        seconds_by_rows=seconds_by_rows,
        num_stages=config.parallel.pipeline_parallel_size,
    )
    loop = _loop(config, executor, settings)
    block_size = config.cache.block_size
    quantization = config.model.quantization
    decisions = (
        *parts_served(checkpoint),
        *model_module(model),
        Decision("device", first.device, first.description),
        *workers(config.parallel, plans, sizing.num_blocks),
        Decision(
            "weights",
            formats_held(plans),
            "set by --quantization" if quantization else first.dtype_reason,
        ),
        Decision("max_model_len", f"{sizing.max_model_len} tokens", length_reason(config.model)),
        Decision("step budget", f"{budget} tokens", budget_reason),
        Decision("KV cache", f"{sizing.num_blocks * block_size} tokens", sizing.reason),
        Decision(
            "KV cache dtype",
            first.kv_dtype,
            first.kv_reason + cache_gain(model.kv_shapes, KVFormat(first.kv_dtype)),
        ),
        *reservation(config.cache, sizing.num_blocks, sizing.max_model_len),
        *speculation_decisions(config.speculation.parsed),
    )
    facts = EngineFacts(
        max_model_len=sizing.max_model_len,
        num_blocks=sizing.num_blocks,
        block_bytes=sum(plan.block_bytes for plan in plans),
        kernels={op: name for _, op, name in first.kernels},
        fingerprint=_fingerprint(checkpoint, config, plans),
        decisions=decisions,
    )
    return loop, facts


def _crew(
    config: Config,
    vocab_size: int,
    checkpoint: Checkpoint,
    model: EngineModel,
    replica: int,
    probe: Probe | None,
) -> Crew:
    """Who computes the model."""
    if not config.parallel.has_workers:
        from octavo.executor.local import LocalWorker

        return LocalWorker(config, vocab_size, checkpoint, model, probe)
    if probe is not None:
        raise ConfigError(
            "what happens in workers' own processes can't be looked at from here; leave "
            "--tensor-parallel-size and --pipeline-parallel-size out"
        )
    if config.parallel.pipeline_parallel_size > 1 and config.scheduler.record_steps is not None:
        raise ConfigError(
            "--record-steps records steps that follow one another, and in a pipeline several are "
            "in flight; leave one of --record-steps and --pipeline-parallel-size out"
        )
    from octavo.executor.multiproc import MultiprocExecutor
    from octavo.executor.starting import worker_starter
    from octavo.models.division import check_division

    check_division(checkpoint, config.parallel)  # before any process is started
    start, launcher = worker_starter(config, vocab_size, checkpoint, replica)
    return MultiprocExecutor(start, launcher, config.parallel.pipeline_parallel_size)


def _simulated_engine(
    config: Config, checkpoint: Checkpoint, vocab_size: int, probe: Probe | None
) -> tuple[EngineLoop, EngineFacts]:
    """Under `simulate`: what `build_engine` makes, but for the model."""
    from octavo.simulator.real_time import real_time_executor

    if probe is not None:
        raise ConfigError("--simulate computes nothing that could be looked at; leave it out")
    executor, sized = real_time_executor(config, checkpoint, vocab_size)
    facts = EngineFacts(
        max_model_len=sized.settings.max_model_len,
        num_blocks=sized.settings.num_blocks,
        block_bytes=sized.block_bytes,
        kernels={},
        fingerprint=f"octavo-simulated-{config.backend.simulate}",
        decisions=sized.decisions,
    )
    return _loop(config, executor, sized.settings), facts


def _loop(config: Config, executor: Executor, settings: SchedulerSettings) -> EngineLoop:
    from octavo.engine.loop import EngineLoop
    from octavo.engine.restarts import Restarts

    scheduler: Scheduler | RecordedScheduler
    if config.scheduler.record_steps is None:
        scheduler = settings.build()
    else:
        from octavo.engine.recording import RecordedScheduler  # only who records loads it

        scheduler = RecordedScheduler(settings, Path(config.scheduler.record_steps), monotonic)
    restarts = Restarts() if config.parallel.restart_workers else None
    depth = executor.max_steps_in_flight
    records = config.scheduler.record_steps is not None
    if settings.num_stages == 1 and (records or config.speculation.parsed.methods):
        # Recorded are steps that follow one another. With drafts, sequences that have none would go
        # on while others' are verified, and from then on the batch would be two halves of itself,
        # each of which reads all weights.
        depth = 1
    return EngineLoop(scheduler, executor, monotonic, depth=depth, restarts=restarts)


def cache_info(config: CacheConfig, facts: EngineFacts) -> dict[str, object]:
    """What `/metrics` says of the KV cache."""
    return {
        **asdict(config),
        "enable_prefix_caching": config.caches_prefixes,
        "num_gpu_blocks": facts.num_blocks,
    }


def engine_child(config: Config) -> EngineChild:
    """A process for `engine_client`, which loads the engine's modules while the text side is made
    in this one.
    """
    from octavo.engine.child import EngineChild

    if config.backend.simulate is not None:
        return EngineChild()
    return EngineChild(partial(_load_modules, config.backend.backend, config.backend.device))


def _load_modules(backend: str, device: str) -> None:
    """What `build_engine` imports. It tells what is missing or broken."""
    if backend != "torch":
        # numpy's BLAS has no work here, but its threads would be busy for 20 ms at the beginning.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with suppress(ImportError):
        for name in _ENGINE_MODULES:
            import_module(name)
        from octavo.ops.backend import auto_backend

        name = auto_backend(device) if backend == "auto" else backend
        import_module(f"octavo.ops.{name}.backend")


def engine_client(
    config: Config,
    checkpoint: Checkpoint,
    vocab_size: int,
    progress: Progress | None = None,
    child: EngineChild | None = None,
) -> EngineClient:
    """A client that has the engine when it has started; its `facts` are EngineFacts.

    progress: called where the engine is built, so it must be picklable. child: begins to build it
    now; None is for a thread of this process, and compared with the other in
    docs/adr/0006-the-engine-has-its-own-process.md.
    """
    build = partial(build_engine, config, vocab_size, progress, checkpoint)
    if child is None:
        from octavo.engine.inprocess import InProcessEngine

        return InProcessEngine(build)
    build_there = partial(_build_in_child, config.server.log_level, build)
    child.begin(build_there)
    from octavo.engine.process import EngineProcess  # takes a while: only now

    return EngineProcess(build_there, child)


def _build_in_child(
    log_level: str, build: Callable[[], tuple[EngineLoop, EngineFacts]]
) -> tuple[EngineLoop, EngineFacts]:
    """In a new process, which has no logging of its own yet."""
    log_to_stderr(log_level)
    return build()


def _fingerprint(checkpoint: Checkpoint, config: Config, plans: Sequence[WorkerPlan]) -> str:
    """Replies with equal fingerprints were computed by the same weights, settings and kernels (of
    the native backend, an implementation's name is its instruction set), divided the same way.
    """
    tensors = sorted((t.name, t.shape, t.dtype) for t in checkpoint.tensors.values())
    size = checkpoint.path.stat().st_size
    first, block_size = plans[0], config.cache.block_size
    kernels = sorted(first.kernels)
    parts: tuple[object, ...] = (
        checkpoint.name, size, tensors, first.formats, first.kv_dtype, block_size, kernels
    )  # fmt: skip
    if len(plans) > 1:
        parts += (config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return f"octavo-{digest[:12]}"


# --- the text's side --------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """How the model reads and writes."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate


def load_text(config: ModelConfig, checkpoint: Checkpoint) -> Text:
    """Tokenizer and chat template: the model's own unless the configuration names others."""
    from octavo.text.chat_template import ChatTemplate, load_template
    from octavo.text.tokenizer import Tokenizer

    assets: TextAssets = checkpoint.text_assets()
    if config.tokenizer is not None:
        other = replace(config, model=config.tokenizer, tokenizer=None)
        assets = open_model(other).text_assets()
    tokenizer = Tokenizer.from_assets(assets, checkpoint.config.get("vocab_size"))
    override = load_template(config.chat_template) if config.chat_template else None
    template = ChatTemplate.from_assets(assets, tokenizer, override=override)
    if not template.exists:
        logger.warning(
            "%s has no chat template: chats will be refused; pass one with --chat-template FILE",
            checkpoint.name,
        )
    return Text(tokenizer, template)


def served_model(
    config: ModelConfig, checkpoint: Checkpoint, text: Text, facts: EngineFacts
) -> ServedModel:
    """The model as clients see it. Raises ConfigError for bad default sampling parameters."""
    draw = secrets.SystemRandom() if config.seed is None else random.Random(config.seed)
    return ServedModel(
        names=tuple(config.served_model_name)
        or tuple(dict.fromkeys((checkpoint.name, config.model))),
        root=config.model,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        max_model_len=facts.max_model_len,
        vocab_size=vocab_size(checkpoint, text),
        eos_token_ids=frozenset(eos_token_ids(checkpoint, text.tokenizer)),
        default_sampling=default_sampling(config, checkpoint.generation_config),
        max_logprobs=config.max_logprobs,
        fingerprint=facts.fingerprint,
        created=int(time.time()),
        draw_seed=partial(draw.getrandbits, 63),
    )


def vocab_size(checkpoint: Checkpoint, text: Text) -> int:
    """Token ids below it exist for both the tokenizer and the model."""
    rows = checkpoint.config.get("vocab_size") or text.tokenizer.vocab_size
    return min(text.tokenizer.vocab_size, int(rows))


def check_draft_models(config: Config, text: Text, vocab_size: int) -> None:
    """Fetches draft models if need be. Raises ConfigError for one with another vocabulary."""
    from octavo.text.vocabulary import require_same_vocabulary

    for method in config.speculation.parsed.methods:
        if method["method"] == "draft_model" and isinstance(name := method.get("model"), str):
            draft = open_model(replace(config.model, model=name))
            require_same_vocabulary(
                text.tokenizer, draft.text_assets(), draft.name, vocab_size=vocab_size
            )


def sampling_decisions(model: ServedModel, config: ModelConfig) -> tuple[Decision, ...]:
    """The sampling parameters of requests that are silent about them, if they aren't Octavo's."""
    if not model.default_sampling:
        return ()
    value = ", ".join(f"{name} {setting}" for name, setting in model.default_sampling.items())
    overridden = {GENERATION_KEYS.get(key, key) for key in config.override_generation_config}
    sources = []
    if model.default_sampling.keys() - overridden:
        sources.append("the model's generation_config.json (--generation-config none ignores it)")
    if overridden:
        sources.append("--override-generation-config")
    return (Decision("sampling defaults", value, " and ".join(sources)),)
