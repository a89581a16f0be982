"""GPT-2. Source: "Language Models are Unsupervised Multitask Learners" (OpenAI, 2019)."""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding, LearnedPositions
from octavo.layers.head import Head
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import GPT2_KEYS, DecoderShape, ModelConfig


@register("GPT2LMHeadModel", model_type="gpt2", models="GPT-2")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("add_cross_attention")
    config = config.under(GPT2_KEYS)
    config = config.under({}, intermediate_size=4 * config.integer("hidden_size"))
    shape = DecoderShape.read(config, ties_embeddings=True, eps_key="layer_norm_epsilon", eps=1e-5)
    activation = config.text("activation_function", "gelu_new")
    is_scaled = config.flag("scale_attn_weights", True)
    is_scaled_by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    # Octavo's own key: GGUF files have these matrices as others have theirs.
    is_transposed = config.flag("has_transposed_weights", True)
    stored = StoredProjections(fused="c_attn", output="c_proj", is_transposed=is_transposed)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"transformer.{name}", shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"h.{index}"
        scale = shape.head_dim**-0.5 if is_scaled else 1.0
        return DecoderBlock(
            norm(f"{name}.ln_1"),
            Attention(
                f"transformer.{name}.attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.heads, shape.head_dim),
                None,
                stored=stored,
                softmax_scale=scale / (index + 1) if is_scaled_by_layer else scale,
                qkv_bias=True,
                output_bias=True,
            ),
            norm(f"{name}.ln_2"),
            MLP(
                f"transformer.{name}.mlp",
                shape.hidden,
                shape.inner,
                activation,
                up="c_fc",
                down="c_proj",
                is_transposed=is_transposed,
            ),
        )

    embedding = Embedding("transformer.wte.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "gpt2",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("ln_f"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
        positions=LearnedPositions("transformer.wpe.weight", shape.context, shape.hidden),
        ignored=("*.attn.bias", "*.attn.masked_bias"),
        renames=(("", "transformer."),),
    )
