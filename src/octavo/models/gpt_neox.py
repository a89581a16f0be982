"""GPT-NeoX and Pythia: attention and MLP side by side, each with its layer norm, heads of which a
part turns. Source: arXiv 2204.06745, 2304.01373.
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


@register("GPTNeoXForCausalLM", model_type="gpt_neox", models="GPT-NeoX, Pythia")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, eps_key="layer_norm_eps", eps=1e-5)
    parameters = config.rope(theta_key="rotary_emb_base", share=0.25)
    rope = RopeTable(shape.head_dim, parameters, shape.context)
    bias = config.flag("attention_bias", True)
    is_parallel = config.flag("use_parallel_residual", True)
    activation = config.text("hidden_act", "gelu")

    # Octavo's own key: GGUF files have all queries, then all keys, then all values.
    is_grouped = config.flag("has_grouped_projections", True)
    stored = StoredProjections(fused="query_key_value", is_grouped=is_grouped, output="dense")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"gpt_neox.{name}", shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"layers.{index}"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"gpt_neox.{name}.attention",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.heads, shape.head_dim),
                rope,
                stored=stored,
                qkv_bias=bias,
                output_bias=bias,
            ),
            norm(f"{name}.post_attention_layernorm"),
            MLP(
                f"gpt_neox.{name}.mlp",
                shape.hidden,
                shape.inner,
                activation,
                up="dense_h_to_4h",
                down="dense_4h_to_h",
            ),
            is_parallel=is_parallel,
        )

    embedding = Embedding("gpt_neox.embed_in.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "gpt_neox",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("final_layer_norm"),
        Head(embedding, None if shape.ties_embeddings else "embed_out.weight"),
        ignored=("*.attention.bias", "*.attention.masked_bias", "*embed_out.weight"),
        renames=(("", "gpt_neox."), ("lm_head.", "embed_out.")),
    )
