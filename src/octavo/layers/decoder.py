"""The block that decoders repeat."""

from __future__ import annotations

from octavo.core.model_spec import LayerSpec
from octavo.layers.attention import Attention
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.layer import Layer, num_vector_parameters
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.ops import Array, BatchContext, add


class DecoderBlock(Layer):
    """Attention, then MLP, each normalised before and added to the residual stream x (T, D).

    attention_norm: None where what comes in is not normalised (EAGLE). attention_out_norm,
    mlp_out_norm: normalise also what is added (Gemma).
    """

    def __init__(
        self,
        attention_norm: RMSNorm | None,
        attention: Attention | LatentAttention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP | MoE,
        *,
        attention_out_norm: RMSNorm | None = None,
        mlp_out_norm: RMSNorm | None = None,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.attention.spec, self.mlp.spec, num_vector_parameters(self))

    def __call__(self, x: Array, ctx: BatchContext) -> Array:
        attended = x if self.attention_norm is None else self.attention_norm(x)
        update = self.attention(attended, ctx)
        if self.attention_out_norm is not None:
            update = self.attention_out_norm(update)
        x = add(x, update)
        update = self.mlp(self.mlp_norm(x))
        if self.mlp_out_norm is not None:
            update = self.mlp_out_norm(update)
        return add(x, update)
