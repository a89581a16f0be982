"""Phi-1, 1.5 and 2: attention and MLP side by side after one layer norm, biases everywhere, heads
of which a part turns. Source: arXiv 2309.05463.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("PhiForCausalLM", model_type="phi", models="Phi-1, 1.5 and 2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, eps_key="layer_norm_eps", eps=1e-5)
    rope = RopeTable(shape.head_dim, config.rope(share=0.5), shape.context)
    has_qk_norm = config.flag("qk_layernorm", False)
    activation = config.text("hidden_act", "gelu_new")

    def norm(name: str, size: int = shape.hidden) -> LayerNorm:
        return LayerNorm(name, size, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"

        def head_norm(part: str) -> LayerNorm | None:
            return norm(f"{name}.self_attn.{part}", shape.head_dim) if has_qk_norm else None

        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                stored=StoredProjections(output="dense"),
                qkv_bias=True,
                output_bias=True,
                query_norm=head_norm("q_layernorm"),
                key_norm=head_norm("k_layernorm"),
            ),
            None,
            MLP(f"{name}.mlp", shape.hidden, shape.inner, activation, up="fc1", down="fc2"),
            is_parallel=True,
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "phi",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.final_layernorm"),
        Head(
            embedding,
            None if shape.ties_embeddings else "lm_head.weight",
            bias="lm_head.bias",
        ),
    )
