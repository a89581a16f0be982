"""The whole model: embedding, blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.model_spec import ModelSpec
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.layer import Layer, num_vector_parameters
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.ops import Array, BatchContext


class CausalLM(Layer):
    """A decoder, from token ids to logits. Has no arrays until `load_weights` gives it some.

    family: the model type. context: positions that its config names. ignored: patterns (fnmatch) of
    checkpoint tensors that are copies or derived from the config, and may be left unread.
    """

    def __init__(
        self,
        family: str,
        context: int,
        embedding: Embedding,
        blocks: list[DecoderBlock],
        norm: RMSNorm,
        head: Head,
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.family = family
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.ignored = (*ignored, "*.rotary_emb.inv_freq")
        if head.is_tied:
            self.ignored += ("lm_head.weight",)
        ropes = self.rope_tables()
        # A scaled table may reach further than the config says; a plain one beside it has no limit
        # of its own.
        self.max_position = max((rope.max_position for rope in ropes), default=context)

    def rope_tables(self) -> list[RopeTable]:
        """Every table once."""
        return list({id(r): r for r in (b.attention.rope for b in self.blocks)}.values())

    def forward(self, ctx: BatchContext) -> Array:
        """Hidden states after the final norm, (T, D)."""
        return self.forward_with_taps(ctx, ())[0]

    def forward_with_taps(self, ctx: BatchContext, taps: Sequence[int]) -> tuple[Array, ...]:
        """What `forward` gives, then the output of each block that `taps` names (0 is the first),
        before any further norm: (T, D) each.
        """
        x = self.embedding(ctx.token_ids)
        tapped = {}  # only these: whatever has a name keeps its memory
        for index, block in enumerate(self.blocks):
            x = block(x, ctx)
            if index in taps:
                tapped[index] = x
        return (self.norm(x), *(tapped[tap] for tap in taps))

    def logits(self, hidden: Array, rows: Array) -> Array:
        """hidden (T, D), rows (R,) int64: those wanted -> (R, V), in the model's dtype."""
        return self.head(hidden, rows)

    @property
    def spec(self) -> ModelSpec:
        vocab_size, hidden_size = self.embedding.table.shape
        return ModelSpec(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            max_position=self.max_position,
            layers=tuple(block.spec for block in self.blocks),
            ties_embeddings=self.head.is_tied,
            num_vector_parameters=num_vector_parameters(self.norm),
        )
