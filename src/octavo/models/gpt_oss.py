"""gpt-oss: local and global layers in turn, a learned sink in each head's attention, experts with
biases and a clamped gate. Source: arXiv 2508.10925.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec, MoESpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.layer import Piece
from octavo.layers.moe import Experts, MoE, RouterLayer, listed_experts
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.attention_windows import gpt_oss_windows
from octavo.weights.mlp_configs import experts
from octavo.weights.model_config import DecoderShape, ModelConfig

_ACTIVATION = "clamped_silu"


@register("GptOssForCausalLM", model_type="gpt_oss", models="gpt-oss")
def build(config: ModelConfig) -> CausalLM:
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.number(key, value) != value:
            raise config.error(key, str(value))
    shape = DecoderShape.read(config, head_dim=64, eps=1e-5)
    windows = gpt_oss_windows(config, shape.num_layers)
    rope = RopeTable(shape.head_dim, config.rope(default_theta=150000.0), shape.context)
    bias = config.flag("attention_bias", True)
    spec = experts(config, "intermediate_size")
    # In MXFP4 the matrices lie the other way round. In GGUF files each is a tensor of its own.
    is_packed = config.mapping("quantization_config").get("quant_method") == "mxfp4"
    are_listed = config.flag("has_listed_experts", False)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        router = f"{name}.mlp.router"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, windows[index]),
                rope,
                qkv_bias=bias,
                output_bias=bias,
                has_sinks=True,
            ),
            norm(f"{name}.post_attention_layernorm"),
            MoE(
                spec,
                RouterLayer(
                    router, shape.hidden, spec, Router(spec.num_active), bias=f"{router}.bias"
                ),
                listed_experts(
                    f"{name}.mlp.experts", shape.hidden, spec, _ACTIVATION, has_biases=True
                )
                if are_listed
                else _experts(
                    f"{name}.mlp.experts", shape.hidden, spec, is_transposed=not is_packed
                ),
            ),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "gpt_oss",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )


def _experts(name: str, hidden: int, spec: MoESpec, *, is_transposed: bool) -> Experts:
    """All experts' matrices are in one tensor, with the gate's outputs and those of up in turn."""
    count, inner = spec.num_experts, spec.expert.inner_size
    pairs, outputs = (2 * inner, hidden), (hidden, inner)
    if is_transposed:
        pairs, outputs = pairs[::-1], outputs[::-1]
    halves = (range(0, 2 * inner, 2), range(1, 2 * inner, 2))
    numbers = range(count)
    return Experts(
        [
            Piece(f"{name}.gate_up_proj", (count, *pairs), number, is_transposed, rows)
            for number in numbers
            for rows in halves
        ],
        [
            Piece(f"{name}.down_proj", (count, *outputs), number, is_transposed)
            for number in numbers
        ],
        hidden,
        spec,
        _ACTIVATION,
        biases=(
            [
                Piece(f"{name}.gate_up_proj_bias", (count, 2 * inner), number, rows=rows)
                for number in numbers
                for rows in halves
            ],
            [Piece(f"{name}.down_proj_bias", (count, hidden), number) for number in numbers],
        ),
    )
