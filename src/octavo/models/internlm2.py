"""InternLM2 and 2.5: Llama with names of its own, and one projection for queries, keys and values,
group after group. Source: arXiv 2403.17297.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register(
    "InternLM2ForCausalLM",
    model_type="internlm2",
    models="InternLM 2 and 2.5",
    oracle="Llama under other names",
)
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config)
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
    bias = config.flag("bias", False)
    activation = config.text("hidden_act", "silu")

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        return DecoderBlock(
            norm(f"{name}.attention_norm"),
            Attention(
                f"{name}.attention",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                stored=StoredProjections(fused="wqkv", is_grouped=True, output="wo"),
                qkv_bias=bias,
                output_bias=bias,
            ),
            norm(f"{name}.ffn_norm"),
            GatedMLP(
                f"{name}.feed_forward",
                shape.hidden,
                shape.inner,
                activation,
                gate_up=("w1", "w3"),
                down="w2",
            ),
        )

    embedding = Embedding("model.tok_embeddings.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "internlm2",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "output.weight"),
    )
