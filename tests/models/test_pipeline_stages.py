"""A model in stages gives the bits that it gives as a whole, for every family."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.core.errors import ConfigError, InvariantError
from octavo.layers.share import Share
from octavo.models.causal_lm import CausalLM
from octavo.models.pipeline_stage import PipelineStage, decoder_to_cut, stages_of
from octavo.models.registry import build_model, engine_model, families
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import cpu_backend
from support.checkpoints import (
    EXPERT_FAMILIES,
    FAMILIES,
    FOREIGN_FAMILIES,
    VOCAB_SIZE,
    make_checkpoint,
)
from support.forward import Forward, load_model
from support.stages import StagedForward, load_stages

TOKENS = np.random.default_rng(1).integers(VOCAB_SIZE, size=40).tolist()
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *EXPERT_FAMILIES)},
    "internlm2": ("internlm2", {}),
    "llama tied (MDL-07)": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "opt 350M": (
        "opt",
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False, "num_hidden_layers": 3},
    ),
    "bloom, sums normalised": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "falcon RW": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
            "num_kv_heads": None,
        },
    ),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "llama4, chunks and temperature": (
        "llama4_text",
        {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5},
    ),
}


def checkpoint_of(variant: str, folder: Path) -> Checkpoint:
    family, overrides = VARIANTS[variant]
    if family == "internlm2":
        return open_checkpoint(str(internlm2(folder)))
    return open_checkpoint(str(make_checkpoint(family, folder, **overrides)))


def internlm2(folder: Path) -> Path:
    """transformers has no module for it: random tensors of the names and shapes that it has."""
    make_checkpoint("llama", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True}
    file.write_text(json.dumps(config))
    rng = np.random.default_rng(2)
    parts = [part for weight in build_model(config).weights() for part in weight.parts()]
    tensors = {name: 0.3 * rng.standard_normal(shape, np.float32) for name, shape in parts}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def one_each(model: CausalLM) -> list[range]:
    return [range(i, i + 1) for i in range(len(model.blocks))]


def check_same_bits(staged: StagedForward, whole: Forward) -> None:
    expected = whole.prompt(TOKENS)
    assert np.array_equal(staged.prompt(TOKENS), expected)
    assert np.array_equal(staged.prompt(TOKENS, chunk=7), expected)
    # A chunk of one sequence beside the next token of another.
    one, other = staged.sequence(TOKENS), staged.sequence(TOKENS)
    staged.step([(one, 30), (other, 9)])
    decoded, chunk = staged.step([(one, 1), (other, 16)])
    assert np.array_equal(decoded, expected[30:31])
    assert np.array_equal(chunk, expected[9:25])


def test_every_registered_family_is_among_the_variants() -> None:
    assert {family.model_type for family in families()} == {f for f, _ in VARIANTS.values()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_give_the_bits_of_the_whole(variant: str, tmp_path: Path) -> None:
    checkpoint, backend = checkpoint_of(variant, tmp_path), cpu_backend("native")
    model = load_model(checkpoint, backend)
    assert isinstance(model, CausalLM)
    whole = Forward(model, backend)
    for ranges in (stages_of(model, 2), one_each(model)):
        assert len(ranges) > 1
        stages = load_stages(checkpoint, backend, ranges)
        check_same_bits(StagedForward(stages, backend), whole)
        assert [shape for stage in stages for shape in stage.kv_shapes] == model.kv_shapes


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_so_does_torch(family: str, tmp_path: Path) -> None:
    checkpoint, backend = checkpoint_of(family, tmp_path), cpu_backend("torch")
    model = load_model(checkpoint, backend)
    assert isinstance(model, CausalLM)
    stages = load_stages(checkpoint, backend, one_each(model))
    check_same_bits(StagedForward(stages, backend), Forward(model, backend))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_and_tied_weights_are_held_alike_wherever_they_are(
    quantization: str, tmp_path: Path
) -> None:
    checkpoint, backend = checkpoint_of("llama tied (MDL-07)", tmp_path), cpu_backend("native")
    whole = Forward(load_model(checkpoint, backend, quantization=quantization), backend)
    ranges = [range(2), range(2, 4), range(4, 5)]
    stages = load_stages(checkpoint, backend, ranges, quantization=quantization)
    check_same_bits(StagedForward(stages, backend), whole)


def test_a_tied_table_is_on_the_first_stage_and_on_the_last(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama tied (MDL-07)", tmp_path)
    model = decoder_to_cut(engine_model(checkpoint.config))
    stages = [PipelineStage(model, blocks) for blocks in stages_of(model, 3)]
    (table,) = model.embedding.table.names
    has_table = [any(table in w.names for w in stage.weights()) for stage in stages]
    assert has_table == [True, False, True]
    again = model.vocab_size * model.spec.hidden_size
    assert sum(stage.num_parameters for stage in stages) == model.num_parameters + again
    names = {name for stage in stages for weight in stage.weights() for name in weight.names}
    assert names == {name for weight in model.weights() for name in weight.names}


def test_a_last_stage_may_embed_drafts(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama tied (MDL-07)", tmp_path)
    model = decoder_to_cut(engine_model(checkpoint.config))
    last = PipelineStage(model, range(3, 5), embeds_drafts=True)
    assert model.embedding.table in list(last.weights())
    plain = PipelineStage(model, range(3, 5))
    assert last.num_parameters == plain.num_parameters  # it is the head's table too


@pytest.mark.parametrize("cuts", [(0, 3, 5), (0, 1, 2, 3, 4, 5), (0, 2, 4, 5)])
def test_blocks_are_tapped_on_whichever_stage_they_are(
    cuts: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint, backend = checkpoint_of("llama tied (MDL-07)", tmp_path), cpu_backend("native")
    model, taps = load_model(checkpoint, backend), (0, 2, 3)
    whole = StagedForward(load_stages(checkpoint, backend, [range(5)]), backend, taps)
    assert np.array_equal(whole.prompt(TOKENS), Forward(model, backend).prompt(TOKENS))
    ranges = [range(a, b) for a, b in pairwise(cuts)]
    staged = StagedForward(load_stages(checkpoint, backend, ranges), backend, taps)
    assert np.array_equal(staged.prompt(TOKENS), whole.prompt(TOKENS))
    assert len(staged.tapped) == len(taps)
    for one, other in zip(staged.tapped, whole.tapped, strict=True):
        assert np.array_equal(one, other)


def test_each_stage_makes_the_tables_of_positions_that_it_uses(tmp_path: Path) -> None:
    """Gemma 3 has one for local layers and one for global ones."""
    checkpoint = checkpoint_of("gemma3_text", tmp_path)
    model = decoder_to_cut(engine_model(checkpoint.config))
    numbers = [len(PipelineStage(model, r).position_tables()) for r in (range(4), range(1, 2))]
    assert numbers == [2, 1]
    assert PipelineStage(model, range(1, 2)).max_position == model.max_position


def test_each_stage_checks_the_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama tied (MDL-07)", tmp_path)
    backend = cpu_backend("native")
    config = dict(checkpoint.config) | {"num_hidden_layers": 6, "intermediate_size": 95}
    first = PipelineStage(decoder_to_cut(engine_model(config)), range(2))
    with pytest.raises(ConfigError) as refusal:
        first.plan_weights(checkpoint, backend, "float32")
    assert "missing: model.layers.5." in str(refusal.value)
    assert "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 64]" in str(refusal.value)
    config = dict(checkpoint.config) | {"num_hidden_layers": 4}
    first = PipelineStage(decoder_to_cut(engine_model(config)), range(2))
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.4\."):
        first.plan_weights(checkpoint, backend, "float32")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_cuts_its_part_of_the_model(rank: int, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama tied (MDL-07)", tmp_path)
    model = decoder_to_cut(engine_model(checkpoint.config))
    model.shard(Share(rank, 2))
    stages = [PipelineStage(model, blocks) for blocks in (range(2), range(2, 5))]
    assert [stage.kv_shapes for stage in stages] == [[(1, 16)] * 2, [(1, 16)] * 3]
    whole = model.plan_weights(checkpoint, cpu_backend("native"), "float32")
    table = model.embedding.table.shape[0] * model.spec.hidden_size * 4
    parts = [stage.plan_weights(checkpoint, cpu_backend("native"), "float32") for stage in stages]
    assert sum(sum(part.num_bytes) for part in parts) == sum(whole.num_bytes) + table


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    """MDL-07."""
    model = engine_model(checkpoint_of("llama", tmp_path).config)
    with pytest.raises(ConfigError, match=r"size 3: the model has 2 layers.* use at most 2"):
        stages_of(model, 3)


def test_modules_of_transformers_are_not_cut(tmp_path: Path) -> None:
    folder = make_checkpoint(FOREIGN_FAMILIES[0], tmp_path)
    model = engine_model(open_checkpoint(str(folder)).config)
    with pytest.raises(ConfigError, match="can't be cut into stages; use --data-parallel-size"):
        stages_of(model, 2)


def test_what_a_stage_lacks_is_not_asked_of_it(tmp_path: Path) -> None:
    model = decoder_to_cut(engine_model(checkpoint_of("llama", tmp_path).config))
    backend = cpu_backend("native")
    first, last = PipelineStage(model, range(1)), PipelineStage(model, range(1, 2))
    with pytest.raises(InvariantError, match=r"blocks range\(0, 1\) have no head"):
        first.logits(backend.from_host(np.zeros((1, 64))), backend.from_host(np.zeros(1, int)))
    forward = Forward(last, backend)
    with pytest.raises(InvariantError, match="given nothing by those before"):
        forward.prompt(TOKENS)
    with pytest.raises(InvariantError, match="the whole model is divided"):
        last.shard(Share(0, 2))
    with pytest.raises(InvariantError, match=r"range\(1, 3\) of 2"):
        PipelineStage(model, range(1, 3))
