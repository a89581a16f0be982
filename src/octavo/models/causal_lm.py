"""The whole model: embedding, blocks, final norm, head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from octavo.core.model_spec import ModelSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding, LearnedPositions
from octavo.layers.head import Head
from octavo.layers.layer import Layer, num_vector_parameters
from octavo.layers.norm import Norm
from octavo.layers.rope import PositionTable, RopeTable
from octavo.layers.share import Share
from octavo.models.cut_groups import check_groups
from octavo.models.loader import load_weights, make_rope_tables, plan_weights, renamed
from octavo.models.stored_piece import Checkpoint
from octavo.ops import Array, BatchContext

if TYPE_CHECKING:
    from octavo.ops.backend import Backend, KVShape, WeightPlan

_T = TypeVar("_T")

# How a cache may be stored (models/kv_factors.py), and how activations: no weights.
_KV_SCALES = ("*.self_attn.*[kvq]_scale",)


@dataclass(frozen=True)
class PlannedWeights:
    """`octavo.models.engine_model.ModelWeights`."""

    model: Layer
    plan: WeightPlan

    @property
    def num_bytes(self) -> tuple[int, ...]:
        return self.plan.num_bytes

    @property
    def formats(self) -> tuple[str, ...]:
        return self.plan.formats

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        load_weights(self.model, self.plan, progress)


class CausalLM(Layer):
    """An `octavo.models.engine_model.EngineModel` of a family that Octavo has. Has no arrays
    until `load_weights` gives it some.

    family: the model type. context: positions that its config names. positions, embedding_norm:
    what embeddings go through before the first block. ignored: patterns (fnmatch) of checkpoint
    tensors that are copies or derived from the config, and may be left unread. renames: as of
    `models.loader.Weighted`.
    """

    module: str | None = None
    only_backend: str | None = None

    def __init__(
        self,
        family: str,
        context: int,
        embedding: Embedding,
        blocks: list[DecoderBlock],
        norm: Norm,
        head: Head,
        *,
        positions: LearnedPositions | None = None,
        embedding_norm: Norm | None = None,
        ignored: tuple[str, ...] = (),
        renames: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.family = family
        self.renames = renames
        self.embedding = embedding
        self.positions = positions
        self.embedding_norm = embedding_norm
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.share: Share | None = None
        self.ignored = (*ignored, *_KV_SCALES, "*.rotary_emb.inv_freq")
        if head.is_tied:
            self.ignored += ("*lm_head.weight",)
        ropes = self.rope_tables()
        # A scaled table may reach further than the config says; a plain one beside it has no limit
        # of its own.
        self.max_position = max((rope.max_position for rope in ropes), default=context)

    def rope_tables(self) -> list[RopeTable]:
        """Every table once."""
        return _rope_tables(self.blocks)

    def position_tables(self) -> list[PositionTable]:
        return position_tables(self.blocks)

    def first_blocks(self, count: int) -> CausalLM:
        """A model of the same weights that ends after `count` blocks."""
        part = copy.copy(self)
        part.blocks = self.blocks[:count]
        return part

    def shard(self, share: Share) -> None:
        """Of `spec`, too, layers are the rank's and the vocabulary is the model's."""
        names = {name for weight in self.weights() for name in weight.names}
        self.embedding.shard(share)
        for block in self.blocks:
            block.shard(share)
        self.head.shard(share)
        self.share = share
        # What only other ranks read is no surprise here.
        left = names - {name for weight in self.weights() for name in weight.names}
        self.ignored += tuple(sorted(left))

    def embed(self, ctx: BatchContext) -> Array:
        """What the first block is given, (T, D)."""
        x = self.embedding(ctx.token_ids)
        if self.positions is not None:
            x = self.positions(x, ctx.positions)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def forward(self, ctx: BatchContext) -> Array:
        """Hidden states after the final norm, (T, D)."""
        return self.forward_with_taps(ctx, ())[0]

    def forward_with_taps(self, ctx: BatchContext, taps: Sequence[int]) -> tuple[Array, ...]:
        """What `forward` gives, then the output of each block that `taps` names (0 is the first),
        before any further norm: (T, D) each.
        """
        x = self.embed(ctx)
        tapped = {}  # only these: whatever has a name keeps its memory
        for index, block in enumerate(self.blocks):
            x = block(x, ctx)
            if index in taps:
                tapped[index] = x
        return (self.norm(x), *(tapped[tap] for tap in taps))

    def logits(self, hidden: Array, rows: Array) -> Array:
        """hidden (T, D), rows (R,) int64: those wanted -> (R, V), in the model's dtype."""
        return self.head(hidden, rows)

    def plan_weights(
        self, checkpoint: Checkpoint, backend: Backend, dtype: str, quantization: str | None = None
    ) -> PlannedWeights:
        plan = plan_weights(self, checkpoint, backend, dtype, quantization)
        self.check_cut_groups(checkpoint, dtype, quantization)
        return PlannedWeights(self, plan)

    def check_cut_groups(
        self, checkpoint: Checkpoint, dtype: str, quantization: str | None
    ) -> None:
        """Raises ConfigError if this rank's weights would be held quantized, and have a part of a
        quantized group.
        """
        if self.share is not None and (dtype == "stored" or quantization is not None):
            check_groups(self.weights(), renamed(self, checkpoint), self.share.size)

    def prepare(self, backend: Backend, num_positions: int) -> None:
        make_rope_tables(self, backend, num_positions)

    @property
    def kv_shapes(self) -> list[KVShape]:
        return self.spec.kv_shapes

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.spec.num_parameters

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.norm.size,
            max_position=self.max_position,
            layers=tuple(block.spec for block in self.blocks),
            ties_embeddings=self.head.is_tied,
            num_vector_parameters=num_vector_parameters(self)
            - sum(map(num_vector_parameters, self.blocks)),
        )


def position_tables(blocks: Sequence[DecoderBlock]) -> list[PositionTable]:
    """The rotary tables, and those that multiply queries: every table once."""
    attentions = [block.attention for block in blocks]
    scales = _each_once(one.temperature for one in attentions if isinstance(one, Attention))
    return [*_rope_tables(blocks), *scales]


def _rope_tables(blocks: Sequence[DecoderBlock]) -> list[RopeTable]:
    return _each_once(block.attention.rope for block in blocks)


def _each_once(objects: Iterable[_T | None]) -> list[_T]:
    return list({id(one): one for one in objects if one is not None}.values())
