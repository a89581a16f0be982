"""A model cut into the stages of a pipeline, run in turn in one thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.models.pipeline_stage import PipelineStage, decoder_to_cut
from octavo.models.registry import engine_model
from octavo.ops.backend import Backend
from octavo.weights import Checkpoint
from support.forward import CachedSequence, Forward, host_batch


def load_stages(
    checkpoint: Checkpoint,
    backend: Backend,
    ranges: Sequence[range],
    *,
    quantization: str | None = None,
    num_positions: int | None = None,
) -> list[PipelineStage]:
    """Each loaded by itself, in float32 unless quantized, as if it had a process of its own."""
    backend.choose("float32", {})
    stages = []
    for blocks in ranges:
        stage = PipelineStage(decoder_to_cut(engine_model(checkpoint.config)), blocks)
        stage.plan_weights(checkpoint, backend, "float32", quantization).load()
        stage.prepare(backend, num_positions or stage.max_position)
        stages.append(stage)
    return stages


class StagedForward(Forward):
    """A `Forward` of stages, each with a cache of its own; what goes from one to the next is copied
    to host memory and back.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], backend: Backend, taps: tuple[int, ...] = ()
    ) -> None:
        self._parts = [Forward(stage, backend) for stage in stages]
        super().__init__(stages[-1], backend)
        self.tapped: list[np.ndarray] = []
        """What the last step's blocks `taps` gave."""
        self._functions = []
        for stage in stages:

            def function(ctx, *given, stage=stage):  # type: ignore[no-untyped-def]
                return stage.forward_with_taps(ctx, taps, *given)

            self._functions.append(backend.compile(function))

    def step(self, work: Sequence[tuple[CachedSequence, int]]) -> list[np.ndarray]:
        batch = host_batch(
            [(s.tokens, s.table, s.num_computed, count) for s, count in work], self.block_size
        )
        backend = self.backend
        given = []
        self.tapped = []
        for part, function in zip(self._parts, self._functions, strict=True):
            x, *taps = function(backend.batch_context(batch, part.kv_layers), *given)
            given = [backend.from_host(np.array(backend.to_host(x)))]
            self.tapped += [np.array(backend.to_host(tap)) for tap in taps]
        for sequence, count in work:
            sequence.num_computed += count
        every_row = backend.from_host(np.arange(batch.query_starts[-1], dtype=np.int64))
        logits = backend.to_host(self._logits(given[0], every_row)).astype(np.float32)
        return np.split(logits, batch.query_starts[1:-1])
