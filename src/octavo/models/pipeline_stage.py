"""A stage of a pipeline: some of a decoder's blocks, with what comes before or behind them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError, InvariantError
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding, LearnedPositions
from octavo.layers.head import Head
from octavo.layers.layer import Layer
from octavo.layers.norm import Norm
from octavo.layers.rope import PositionTable
from octavo.layers.share import Share
from octavo.models.causal_lm import CausalLM, PlannedWeights, position_tables
from octavo.models.engine_model import EngineModel
from octavo.models.loader import make_rope_tables, plan_weights
from octavo.models.stored_piece import Checkpoint
from octavo.ops import Array, BatchContext
from octavo.parallel.stage_division import divide_layers

if TYPE_CHECKING:
    from octavo.ops.backend import Backend, KVShape


def stages_of(model: EngineModel, num_stages: int) -> list[range]:
    """The blocks of each stage. Raises ConfigError for a model that can't be cut, and for more
    stages than it has layers.
    """
    return divide_layers(decoder_to_cut(model).spec, num_stages)


def decoder_to_cut(model: EngineModel) -> CausalLM:
    """The model, if it is one of Octavo's own. Raises ConfigError for another."""
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"--pipeline-parallel-size: {model.family} runs as transformers' module, which can't be"
            " cut into stages; use --data-parallel-size, which runs the whole model several times"
        )
    return model


class PipelineStage(Layer):
    """An `octavo.models.engine_model.EngineModel` of the blocks `blocks` of a model. Its weights
    are the model's own `Weight`s: what is loaded into one is in the other.

    The embedding (with positions and its norm) is the first stage's, the last norm and the head are
    the last's. A tied table so is on both. embeds_drafts: a stage that isn't the first has the
    embedding too, for draft heads that look up tokens in it.

    The whole model's: family, module, only_backend, vocab_size, max_position. The stage's own:
    kv_shapes, num_parameters, weights. hidden_size: D, of what goes from stage to stage.
    Ranks of a tensor-parallel group divide the model (`shard`) before it is cut.
    """

    module: str | None = None
    only_backend: str | None = None

    def __init__(self, model: CausalLM, blocks: range, *, embeds_drafts: bool = False) -> None:
        num_blocks = len(model.blocks)
        if not 0 <= blocks.start < blocks.stop <= num_blocks:
            raise InvariantError(f"a stage of blocks {blocks} of {num_blocks}")
        self.is_first = blocks.start == 0
        self.is_last = blocks.stop == num_blocks
        self.range = blocks
        self.family = model.family
        self.max_position = model.max_position
        self.vocab_size = model.vocab_size
        self.hidden_size = model.spec.hidden_size
        self.kv_shapes: list[KVShape] = model.kv_shapes[blocks.start : blocks.stop]
        self.embedding: Embedding | None = None
        self.positions: LearnedPositions | None = None
        self.embedding_norm: Norm | None = None
        self.norm: Norm | None = None
        self.head: Head | None = None
        if self.is_first or embeds_drafts:
            self.embedding = model.embedding
        if self.is_first:
            self.positions = model.positions
            self.embedding_norm = model.embedding_norm
        self.blocks = [_rebased(model.blocks[i], i - blocks.start) for i in blocks]
        if self.is_last:
            self.norm = model.norm
            self.head = model.head
        self._whole = (model,)  # in a tuple: its weights are not among the stage's

    def own_taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        """Those of `taps` (blocks of the whole model) that are the stage's."""
        return tuple(tap for tap in taps if tap in self.range)

    def forward(self, ctx: BatchContext) -> Array:
        return self.forward_with_taps(ctx, ())[0]

    def forward_with_taps(
        self, ctx: BatchContext, taps: Sequence[int], x: Array | None = None
    ) -> tuple[Array, ...]:
        """What the stage gives, then the output of each of its blocks that `taps` names by its
        number in the whole model: (T, D) each. x (T, D): what the stage before gave.
        """
        if x is None:
            if not self.is_first:
                raise InvariantError(f"blocks {self.range} are given nothing by those before")
            x = self._whole[0].embed(ctx)
        tapped = {}
        for index, block in zip(self.range, self.blocks, strict=True):
            x = block(x, ctx)
            if index in taps:
                tapped[index] = x
        given = x if self.norm is None else self.norm(x)
        return (given, *(tapped[tap] for tap in self.own_taps(taps)))

    def logits(self, hidden: Array, rows: Array) -> Array:
        """Of the last stage."""
        if self.head is None:
            raise InvariantError(f"blocks {self.range} have no head")
        return self.head(hidden, rows)

    def shard(self, share: Share) -> None:
        raise InvariantError(f"blocks {self.range} are cut already: the whole model is divided")

    def plan_weights(
        self, checkpoint: Checkpoint, backend: Backend, dtype: str, quantization: str | None = None
    ) -> PlannedWeights:
        """The stage's weights. The checkpoint must be that of the whole model nevertheless."""
        (whole,) = self._whole
        plan = plan_weights(whole, checkpoint, backend, dtype, quantization, part=self)
        whole.check_cut_groups(checkpoint, dtype, quantization)
        return PlannedWeights(self, plan)

    def position_tables(self) -> list[PositionTable]:
        return position_tables(self.blocks)

    def prepare(self, backend: Backend, num_positions: int) -> None:
        make_rope_tables(self, backend, num_positions)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(group[0].shape) for group in self.tensors())


def _rebased(block: DecoderBlock, index: int) -> DecoderBlock:
    """The same block, whose cache is that of layer `index`. The model keeps its own."""
    rebased = copy.copy(block)
    rebased.attention = copy.copy(block.attention)
    rebased.attention.index = index
    return rebased
