"""Llama 4, text only: local layers that see their own chunk of the text, every few layers one
without positions that sees all and sharpens its attention far behind, experts of which a token uses
one beside the one that all share. Source: the models' module in transformers.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec, MLPSpec, MoESpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.layer import Piece
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import Experts, MoE, RouterLayer, listed_experts
from octavo.layers.norm import PlainRMSNorm, RMSNorm
from octavo.layers.rope import RopeTable, Temperature
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.attention_windows import llama4_rotates, llama4_windows
from octavo.weights.mlp_configs import llama4_experts
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Llama4ForCausalLM", model_type="llama4_text", models="Llama 4, text")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, head_dim=128, eps=1e-5)
    windows = llama4_windows(config, shape.num_layers)
    rotates = llama4_rotates(config, shape.num_layers)
    rope = RopeTable(shape.head_dim, config.rope(default_theta=500000.0), shape.context)
    has_qk_norm = config.flag("use_qk_norm", True)
    bias = config.flag("attention_bias", False)
    activation = config.text("hidden_act", "silu")
    temperature = None
    if config.values.get("attn_temperature_tuning", True):  # published configs have a number
        weight, length = config.number("attn_scale", 0.1), config.number("floor_scale", 8192)
        temperature = Temperature(shape.head_dim, weight, length)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, shape.hidden, shape.eps)

    def head_norm(index: int) -> PlainRMSNorm | None:
        """Has no weight, and so gives the same before the rotation as behind it."""
        return PlainRMSNorm(shape.head_dim, shape.eps) if has_qk_norm and rotates[index] else None

    def mlp(name: str, index: int) -> GatedMLP | MoE:
        spec, _ = llama4_experts(config, shape.hidden, index)
        if isinstance(spec, MLPSpec):
            return GatedMLP(name, shape.hidden, spec.inner_size, activation)
        router = Router(spec.num_active, "sigmoid", renormalizes=False)
        return MoE(
            spec,
            RouterLayer(f"{name}.router", shape.hidden, spec, router),
            experts(f"{name}.experts", spec),
            GatedMLP(f"{name}.shared_expert", shape.hidden, spec.expert.inner_size, activation),
        )

    def experts(name: str, spec: MoESpec) -> Experts:
        count, inner, hidden = spec.num_experts, spec.expert.inner_size, shape.hidden
        if config.flag("has_listed_experts", False):  # in GGUF files
            return listed_experts(name, hidden, spec, activation, weighs_inputs=True)
        stored, outputs = f"{name}.gate_up_proj", f"{name}.down_proj"
        return Experts(
            [Piece(stored, (count, hidden, 2 * inner), n, True) for n in range(count)],
            [Piece(outputs, (count, inner, hidden), n, True) for n in range(count)],
            hidden,
            spec,
            activation,
            weighs_inputs=True,
        )

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, windows[index]),
                rope if rotates[index] else None,
                stored=StoredProjections(is_interleaved=True),
                qkv_bias=bias,
                output_bias=bias,
                query_norm=head_norm(index),
                key_norm=head_norm(index),
                chunk=windows[index],
                temperature=None if rotates[index] else temperature,
            ),
            norm(f"{name}.post_attention_layernorm"),
            mlp(f"{name}.feed_forward", index),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "llama4_text",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
