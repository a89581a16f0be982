"""Whether a model can be divided as it is asked for."""

from __future__ import annotations

from octavo.config import ParallelConfig
from octavo.layers.share import Share
from octavo.models.cut_groups import column_unit
from octavo.models.pipeline_stage import stages_of
from octavo.models.registry import engine_model
from octavo.weights import Checkpoint


def check_division(checkpoint: Checkpoint, config: ParallelConfig) -> None:
    """Raises ConfigError, with the numbers, for what the workers would refuse."""
    model = engine_model(checkpoint.config)
    if config.pipeline_parallel_size > 1:
        stages_of(model, config.pipeline_parallel_size)
    if config.tensor_parallel_size > 1:
        unit = column_unit(checkpoint)
        model.shard(Share(0, config.tensor_parallel_size, inner_unit=unit))
