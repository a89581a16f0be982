"""One rank's part of a model: what it will take, loading it, running steps.

A model that one process computes has one worker, in that process. Otherwise each worker is a
process of its own (worker_main.py), and all ranks of a pipeline's stage run every step alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo import machine
from octavo.config import Config
from octavo.core.dtypes import plain_kv_dtype
from octavo.core.errors import InvariantError
from octavo.core.model_spec import KVFormat
from octavo.executor.base import Progress
from octavo.executor.messages import Place, Sizes, WorkerPlan
from octavo.layers.share import Share
from octavo.models.cut_groups import column_unit
from octavo.models.engine_model import EngineModel, ModelWeights
from octavo.models.kv_factors import factors_of_cache
from octavo.models.pipeline_stage import PipelineStage, decoder_to_cut, stages_of
from octavo.models.registry import engine_model
from octavo.ops.backend import Backend, backend_name, load_backend
from octavo.runner.model_runner import ModelRunner
from octavo.runner.stage_runner import StageRunner
from octavo.sampling.sampler import Sampler
from octavo.weights import Checkpoint, open_model

if TYPE_CHECKING:
    from octavo.ops.collectives import Group
    from octavo.runner.pipeline import Pipeline
    from octavo.speculative.proposers import Proposers


@dataclass(frozen=True)
class Neighbours:
    """What a worker has of the others: those that share its layers, and the stages around it."""

    group: Group | None = None
    pipeline: Pipeline | None = None


def worker_backend(config: Config, model: EngineModel) -> Backend:
    """Raises ConfigError for one that isn't there, or that the model can't run on."""
    return load_backend(
        backend_name(config.backend.backend, model.only_backend, model.family),
        device=config.backend.device,
        threads=config.backend.threads,
    )


def chosen_kernels(config: Config, checkpoint: Checkpoint, backend: Backend) -> dict[str, str]:
    """Op to implementation. Raises ConfigError."""
    dtype, _ = _dtype(config, checkpoint, backend)
    choices = backend.choose(dtype, config.backend.kernels)
    return {one.op: one.implementation.name for one in choices}


def _dtype(config: Config, checkpoint: Checkpoint, backend: Backend) -> tuple[str, str]:
    stored = str(checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or "")
    return backend.resolve_dtype(config.model.dtype, stored)


class Worker:
    """Built without weights; `load` makes it able to `execute`."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        checkpoint: Checkpoint,
        *,
        model: EngineModel | None = None,
        backend: Backend | None = None,
        place: Place = Place(),  # noqa: B008  # it is a constant
        neighbours: Neighbours = Neighbours(),  # frozen
    ) -> None:
        """vocab_size: as of `ModelRunner`. model: the whole, if it is built already. Raises
        ConfigError.
        """
        self._config = config
        self._vocab_size = vocab_size
        self._checkpoint = checkpoint
        self._place = place
        self._neighbours = neighbours
        whole = model or engine_model(checkpoint.config)
        shapes = whole.kv_shapes  # before it is divided
        self.backend = backend or worker_backend(config, whole)
        dtype, dtype_reason = _dtype(config, checkpoint, self.backend)
        self._choices = self.backend.choose(dtype, config.backend.kernels)
        self._sampler = Sampler(
            self.backend, max_num_seqs=config.scheduler.max_num_seqs, vocab_size=vocab_size
        )
        layers = range(len(shapes))
        if place.num_stages > 1:  # the same for all ranks, whose shares may differ
            layers = stages_of(whole, place.num_stages)[place.stage]
        if place.tensor_size > 1:
            unit = column_unit(checkpoint)
            whole.shard(Share(place.tensor_rank, place.tensor_size, neighbours.group, unit))
        self._speculation = self._build_speculation(whole, dtype)
        self._model = self._stage(whole, layers)
        weights = self._model.plan_weights(
            checkpoint, self.backend, dtype, config.model.quantization
        )
        kv_dtype, kv_reason = self.backend.resolve_kv_dtype(
            plain_kv_dtype(config.cache.kv_cache_dtype), dtype, weights
        )
        self._kv_format = KVFormat(kv_dtype)
        factors = factors_of_cache(checkpoint, shapes, self._kv_format)
        self._kv_factors = None if factors is None else [factors[layer] for layer in layers]
        if factors is not None:
            kv_reason += ", with the checkpoint's scales"
        self._weights: ModelWeights = weights
        self.plan = self._planned(dtype_reason, kv_dtype, kv_reason)

    def load(self, sizes: Sizes, progress: Progress | None = None) -> None:
        """Read the weights. Raises ConfigError."""
        self._weights.load(progress)
        self._checkpoint.release_pages()
        self._model.prepare(self.backend, sizes.max_model_len)

    def stage_runner(self, sizes: Sizes) -> StageRunner:
        """Of the loaded stage, which isn't the last. Raises ConfigError if there is no memory for
        the cache.
        """
        pipeline = self._neighbours.pipeline
        if pipeline is None or not isinstance(self._model, PipelineStage):
            raise InvariantError(f"{self._place} is no stage of a pipeline")
        return StageRunner(
            self._model,
            self.backend,
            pipeline,
            num_blocks=sizes.num_blocks,
            block_size=self._config.cache.block_size,
            kv_format=self._kv_format,
            kv_factors=self._kv_factors,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=sizes.max_model_len,
            taps=sizes.taps,
            group=self._neighbours.group,
        )

    def runner(self, sizes: Sizes, backend: Backend | None = None) -> ModelRunner:
        """Of the loaded model, or of its last stage. backend: one that stands before the worker's
        own. Raises ConfigError if there is no memory for the cache.
        """
        return ModelRunner(
            self._model,
            backend or self.backend,
            self._sampler,
            num_blocks=sizes.num_blocks,
            block_size=self._config.cache.block_size,
            kv_format=self._kv_format,
            kv_factors=self._kv_factors,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=sizes.max_model_len,
            vocab_size=self._vocab_size,
            speculation=self._speculation,
            pipeline=self._neighbours.pipeline,
            group=self._neighbours.group,
        )

    def _stage(self, model: EngineModel, layers: range) -> EngineModel:
        """What is computed here of the rank's part of the model."""
        if self._place.num_stages == 1:
            return model
        embeds_drafts = self._speculation is not None and self._speculation.embeds_tokens
        return PipelineStage(decoder_to_cut(model), layers, embeds_drafts=embeds_drafts)

    def _build_speculation(self, model: EngineModel, dtype: str) -> Proposers | None:
        """All that guesses, with its weights loaded: where tokens are sampled. model: the rank's
        part, of all stages.
        """
        place, config = self._place, self._config
        methods = config.speculation.parsed.methods
        if not methods or not place.is_last_stage:
            return None
        from octavo.speculative.proposers import Proposers  # only who guesses loads it
        from octavo.speculative.registry import Target, build_proposers

        target = Target(
            model=model,
            checkpoint=self._checkpoint,
            backend=self.backend,
            sampler=self._sampler,
            dtype=dtype,
            quantization=config.model.quantization,
            vocab_size=self._vocab_size,
            open_model=lambda name: open_model(
                replace(config.model, model=name, revision=None)  # that of the target's
            ),
            num_stages=place.num_stages,
        )
        return Proposers(build_proposers(methods, target))

    def _planned(self, dtype_reason: str, kv_dtype: str, kv_reason: str) -> WorkerPlan:
        backend, weights = self.backend, self._weights
        shapes = self._model.kv_shapes
        if self._speculation is not None:
            shapes = [*shapes, *self._speculation.kv_heads]
        num_bytes: Counter[str] = Counter()
        for name, size in zip(weights.formats, weights.num_bytes, strict=True):
            num_bytes[name] += size
        return WorkerPlan(
            weights=dict(num_bytes),
            formats=weights.formats,
            block_bytes=backend.kv_block_bytes(
                self._config.cache.block_size, shapes, self._kv_format
            ),
            free_memory_bytes=backend.free_memory_bytes(),
            memory=f"{machine.boot_id()} {backend.device}",
            max_position=self._model.max_position,
            device=backend.device,
            backend=backend.name,
            description=backend.describe(),
            dtype_reason=dtype_reason,
            kv_dtype=kv_dtype,
            kv_reason=kv_reason,
            kernels=tuple(
                (one.implementation.backend, one.op, one.implementation.name)
                for one in self._choices
            ),
            taps=() if self._speculation is None else self._speculation.taps,
            num_layers=len(self._model.kv_shapes),
        )
