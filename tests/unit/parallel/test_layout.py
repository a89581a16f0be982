"""Who has which part of a model, and why a layout can't be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from octavo.core.errors import ConfigError
from octavo.core.model_spec import (
    AttentionSpec,
    KVFormat,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RecurrentSpec,
)
from octavo.core.weight_format import WEIGHT_FORMATS
from octavo.parallel.layout import NO_BLOCKS, Blocks, Layout, Part, Room, parts_of, refusals

BFLOAT16 = WEIGHT_FORMATS["bfloat16"]
KV = KVFormat("bfloat16")
MIB = 2**20


def model(
    mixer: AttentionSpec | LatentAttentionSpec | RecurrentSpec | None = None,
    mlp: MLPSpec | MoESpec | None = None,
    *,
    num_layers: int = 4,
    ties: bool = True,
    vocab_size: int = 1024,
) -> ModelSpec:
    layer = LayerSpec(mixer or AttentionSpec(8, 4, 64), mlp or MLPSpec(1024), 512)
    return ModelSpec("llama", vocab_size, 256, 4096, (layer,) * num_layers, ties, 256)


def heads(parts: tuple[Part, ...]) -> list[tuple[int, int]]:
    return [
        (mixer.num_heads, mixer.num_kv_heads)
        for part in parts
        for mixer in part.spec.grouped_attention[:1]
    ]


def test_ranks_are_numbered_stage_after_stage_and_machine_after_machine() -> None:
    layout = Layout(tensor=2, stages=3, nnodes=3)
    assert layout.num_workers == 6
    assert [layout.stage(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.tensor_rank(rank) for rank in range(6)] == [0, 1] * 3
    assert [layout.rank(stage, one) for stage in range(3) for one in range(2)] == list(range(6))
    assert layout.group(3) == range(2, 4)
    assert [layout.node(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert layout.ranks_of_node(2) == range(4, 6)


def test_one_rank_has_all() -> None:
    for spec in (model(), model(ties=False)):
        (part,) = parts_of(spec, Layout())
        assert part.spec == spec
        assert part.weight_bytes(BFLOAT16, BFLOAT16) == spec.weight_bytes(BFLOAT16, BFLOAT16)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (4, 1), (1, 2), (2, 2), (4, 4)])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(
    "mlp", [None, MoESpec(MLPSpec(128), 8, 2), MoESpec(MLPSpec(128), 8, 2, MLPSpec(256))]
)
def test_parts_make_up_the_whole(tensor: int, stages: int, ties: bool, mlp: MoESpec | None) -> None:
    spec = model(mlp=mlp, ties=ties)
    parts = parts_of(spec, Layout(tensor, stages))
    assert [part.rank for part in parts] == list(range(tensor * stages))
    own = sum(part.spec.num_matrix_parameters for part in parts)
    routers = 0 if mlp is None else 4 * 256 * 8  # every rank has them
    assert own == spec.num_matrix_parameters + (tensor - 1) * routers
    assert sum(part.kv_bytes_per_token(KV) for part in parts) == spec.kv_bytes_per_token(KV)
    rows = sum(part.num_tables * part.spec.vocab_size for part in parts)
    assert rows == 1024 * (1 if ties and stages == 1 else 2)


def test_what_heads_leave_uneven_the_mlp_makes_up_for() -> None:
    parts = parts_of(model(AttentionSpec(9, 3, 64)), Layout(2))
    assert heads(parts) == [(6, 2), (3, 1)]
    assert [part.kv_bytes_per_token(KV) for part in parts] == [2048, 1024]
    matrices = [part.spec.num_matrix_parameters for part in parts]
    one_unit = 4 * 32 * 3 * 256
    assert abs(matrices[0] - matrices[1]) <= one_unit


def test_kv_heads_are_copied_and_latent_vectors_are_whole() -> None:
    parts = parts_of(model(AttentionSpec(8, 2, 64)), Layout(4))
    assert heads(parts) == [(2, 1)] * 4
    latent = model(LatentAttentionSpec(8, None, 64, 32, 16, 32))
    for part in parts_of(latent, Layout(4)):
        assert part.kv_bytes_per_token(KV) == latent.kv_bytes_per_token(KV)
        assert part.spec.layers[0].mixer == LatentAttentionSpec(2, None, 64, 32, 16, 32)


def test_states_of_recurrent_layers_are_divided() -> None:
    parts = parts_of(model(RecurrentSpec(1000, 600, 50)), Layout(2))
    assert [part.spec.state_bytes for part in parts] == [4 * 300] * 2


@pytest.mark.parametrize(
    ("spec", "layout", "blocks", "reason"),
    [
        (
            model(AttentionSpec(8, 5, 64)),
            Layout(4),
            NO_BLOCKS,
            "have 2 of the 5 key/value",
        ),
        (
            model(AttentionSpec(8, 2, 64)),
            Layout(3),
            NO_BLOCKS,
            "8 attention heads with 2 key",
        ),
        (model(mlp=MLPSpec(24)), Layout(4), NO_BLOCKS, "24 inner columns, in groups of 8"),
        (
            model(mlp=MLPSpec(256)),
            Layout(4),
            Blocks(inner=128),
            "256 inner columns, in groups of 128",
        ),
        (
            model(),
            Layout(4),
            Blocks(output=256),
            "attention's output projection has 512 columns in groups of 256, of which columns 128 ",
        ),
        (
            model(mlp=MLPSpec(72)),
            Layout(4),
            Blocks(inner=32),
            "an MLP has 72 columns in groups of 32, of which columns 24 to 39, one rank's",
        ),
        (model(), Layout(2), Blocks(are_scattered=True), "scattered over its rows (desc_act)"),
        (
            model(),
            Layout(stages=5),
            NO_BLOCKS,
            "size 5: the model has 4 layers",
        ),
        (
            model(),
            Layout(2, 2, nnodes=3),
            NO_BLOCKS,
            "--nnodes 3: 4 workers can't be divided",
        ),
        (
            model(vocab_size=3),
            Layout(4),
            NO_BLOCKS,
            "a vocabulary of 3 tokens can't be",
        ),
    ],
)
def test_why_not(spec: ModelSpec, layout: Layout, blocks: Blocks, reason: str) -> None:
    (found,) = refusals(spec, layout, blocks=blocks)
    assert reason in found
    if layout.nnodes == 1 and not blocks.are_scattered:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            parts_of(spec, layout, blocks)


def test_all_reasons_are_named() -> None:
    """Each once, though all layers have them."""
    spec = model(AttentionSpec(8, 5, 64), MLPSpec(24))
    found = refusals(spec, Layout(4, 5), num_devices=4)
    assert len(found) == 4
    assert found[-1] == "TP 4 x PP 5: 20 workers of a machine need a GPU each, and there are 4"


def test_memory() -> None:
    """Of each worker's device, or of a machine that its workers share."""
    spec = model(num_layers=8)
    layout = Layout(2)
    parts = parts_of(spec, layout)
    room = Room(BFLOAT16, BFLOAT16, KV, 1000, 0, is_shared=False)
    needed = max(map(room.needed_bytes, parts))
    assert needed == pytest.approx(
        parts[0].weight_bytes(BFLOAT16, BFLOAT16) + 1000 * 8 * 2 * 2 * 64 * 2
    )
    assert not refusals(spec, layout, room=room._replace(free_bytes=int(needed) + 1))
    (reason,) = refusals(spec, layout, room=room._replace(free_bytes=int(needed) - 1))
    assert f"TP 2 x PP 1: a worker would need {needed / MIB:.0f} MiB for weights and" in reason
    shared = room._replace(free_bytes=int(needed) + 1, is_shared=True)
    (reason,) = refusals(spec, layout, room=shared)
    assert f"the workers of a machine would need {2 * needed / MIB:.0f} MiB" in reason
    assert not refusals(spec, replace(layout, nnodes=2), room=shared)
