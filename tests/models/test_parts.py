"""What is said of a rank's part, by numbers alone, is what the rank's model is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.model_spec import LayerSpec
from octavo.layers.share import Share
from octavo.models.causal_lm import CausalLM
from octavo.models.pipeline_stage import PipelineStage, stages_of
from octavo.models.registry import engine_model
from octavo.parallel.layout import Layout, parts_of
from octavo.weights import open_checkpoint
from support.checkpoints import FOREIGN_FAMILIES, make_checkpoint
from support.family_variants import VARIANTS

OWN = [variant for variant in VARIANTS if variant not in FOREIGN_FAMILIES]


def of_matrices(layer: LayerSpec) -> LayerSpec:
    """Vectors count whole on every rank, though biases are divided: they are no size."""
    return replace(layer, num_vector_parameters=0)


@pytest.mark.parametrize("variant", OWN)
def test_parts_are_the_ranks_models(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    checkpoint = open_checkpoint(str(make_checkpoint(family, tmp_path, **overrides)))
    whole = engine_model(checkpoint.config)
    assert isinstance(whole, CausalLM)
    layout = Layout(tensor=2, stages=min(2, len(whole.blocks)))
    stages = stages_of(whole, layout.stages)
    for part in parts_of(whole.spec, layout):
        model = engine_model(checkpoint.config)
        assert isinstance(model, CausalLM)
        model.shard(Share(layout.tensor_rank(part.rank), layout.tensor))
        stage = PipelineStage(model, stages[layout.stage(part.rank)])
        assert part.layers == stage.range
        assert part.spec.kv_shapes == stage.kv_shapes
        assert [*map(of_matrices, part.spec.layers)] == [
            of_matrices(block.spec) for block in stage.blocks
        ]
        has_tables = [stage.embedding is not None, stage.head is not None]
        is_one = all(has_tables) and whole.spec.ties_embeddings
        assert part.num_tables == (1 if is_one else sum(has_tables))
