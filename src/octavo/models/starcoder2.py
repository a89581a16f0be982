"""StarCoder2: rotary embedding, grouped heads and a window, but layer norms and an MLP without
gate. Source: arXiv 2402.19173.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Starcoder2ForCausalLM", model_type="starcoder2", models="StarCoder2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, ties_embeddings=True, eps_key="norm_epsilon", eps=1e-5)
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
    window = config.optional_integer("sliding_window")
    bias = config.flag("use_bias", True)
    activation = config.text("hidden_act", "gelu_pytorch_tanh")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, window),
                rope,
                qkv_bias=bias,
                output_bias=bias,
            ),
            norm(f"{name}.post_attention_layernorm"),
            MLP(
                f"{name}.mlp",
                shape.hidden,
                shape.inner,
                activation,
                up="c_fc",
                down="c_proj",
                has_bias=bias,
            ),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "starcoder2",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
