"""The block that decoders repeat."""

from __future__ import annotations

from octavo.core.model_spec import LayerSpec
from octavo.layers.attention import Attention
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.layer import Layer, num_vector_parameters
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.moe import MoE
from octavo.layers.norm import Norm
from octavo.layers.share import Share
from octavo.ops import Array, BatchContext, add, scale


class DecoderBlock(Layer):
    """Attention, then MLP, each normalised before and added to the residual stream x (T, D).

    attention_norm, mlp_norm: None where what comes in is not normalised (EAGLE, OLMo 2).
    attention_out_norm, mlp_out_norm: normalise also what is added (Gemma). is_parallel: both see
    the same x, and without an mlp_norm the same normalised x. keeps_normed: what is normalised
    replaces x (norms come behind the sums; the first block's may be missing, and the model's last
    norm is the last block's). residual_factor: of what is added.
    """

    def __init__(
        self,
        attention_norm: Norm | None,
        attention: Attention | LatentAttention,
        mlp_norm: Norm | None,
        mlp: GatedMLP | MLP | MoE,
        *,
        attention_out_norm: Norm | None = None,
        mlp_out_norm: Norm | None = None,
        is_parallel: bool = False,
        keeps_normed: bool = False,
        residual_factor: float = 1.0,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm
        self.is_parallel = is_parallel
        self.keeps_normed = keeps_normed
        self.residual_factor = residual_factor
        self.share: Share | None = None

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.attention.spec, self.mlp.spec, num_vector_parameters(self))

    def shard(self, share: Share) -> None:
        """Keep a rank's heads and inner columns; the rest is every rank's."""
        self.mlp.shard(share, self.attention.shard(share))
        self.share = share

    def __call__(self, x: Array, ctx: BatchContext) -> Array:
        attended = x if self.attention_norm is None else self.attention_norm(x)
        stream = attended if self.keeps_normed else x
        if self.share is not None and self._adds_one_update:
            given = attended if self.mlp_norm is None else self.mlp_norm(x)
            of_both = add(self.attention(attended, ctx), self.mlp(given))
            return self._sum(x, self.share.sum(of_both), None)
        y = self._of_ranks(self.attention(attended, ctx))
        y = self._sum(stream, y, self.attention_out_norm)
        given = x if self.is_parallel else y
        if self.mlp_norm is not None:
            given = self.mlp_norm(given)
        elif self.is_parallel:
            given = attended
        stream = given if self.keeps_normed else y
        return self._sum(stream, self._of_ranks(self.mlp(given)), self.mlp_out_norm)

    @property
    def _adds_one_update(self) -> bool:
        """Whether attention and MLP may be added up before ranks are: one exchange instead of
        two.
        """
        norms = (self.attention_out_norm, self.mlp_out_norm)
        return self.is_parallel and not self.keeps_normed and norms == (None, None)

    def _of_ranks(self, x: Array) -> Array:
        return x if self.share is None else self.share.sum(x)

    def _sum(self, x: Array, update: Array, norm: Norm | None) -> Array:
        if norm is not None:
            update = norm(update)
        if self.residual_factor != 1.0:
            update = scale(update, self.residual_factor)
        return add(x, update)
