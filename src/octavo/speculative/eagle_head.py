"""The layers of EAGLE's draft heads, as their checkpoints have them.

An input row p is a feature of token p, which the target computed or the head guessed, with the
embedding of token p + 1; its output row guesses the feature of token p + 1, from which the head
makes the logits of token p + 2.

EAGLE-1 and 2 (arXiv 2401.15077, section 3.1; 2406.16858) differ in how they draft, not in their
heads: `fc` (D, 2D, perhaps a bias) joins embedding and feature, in this order; then come `layers.*`
of a Llama, the first without `input_layernorm`. Features are the target's states after its final
norm, and the target's own head makes logits of them.

EAGLE-3 (arXiv 2503.01840, section 3): `fc` (D, 3D) makes the feature from the outputs of three
layers of the target, and only from those: what the head itself puts out is fed back as it is. Its
one layer, `midlayer.*` in its code and `layers.0.*` in vLLM's, attends with both
input_layernorm(embedding) and hidden_norm(feature), 2D wide in this order; its residual stream is
the feature. Logits are those of `norm` and the head's own `lm_head`, over the tokens that `d2t`
names.

Sources of the names: SafeAILab/EAGLE, eagle/model/cnets1.py and cnets.py; vLLM, llama_eagle.py and
llama_eagle3.py. Embeddings are the target's in both; `embed_tokens` is read only where it is of
another width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, BatchContext, add
from octavo.speculative.head_checkpoint import LM_HEAD, DraftLogits
from octavo.weights.model_config import DecoderShape, ModelConfig

Embed = Callable[[Array], Array]


class EagleHead(Protocol):
    """What drafting needs of a head. It is also a `models.loader.Weighted`.

    kv_heads: (G, E) of its layers. taps: the target's layers whose outputs side by side are the
    features; none if these are its final states. num_features: their width.
    """

    family: str
    ignored: tuple[str, ...]
    renames: tuple[tuple[str, str], ...]
    kv_heads: list[tuple[int, int]]
    taps: tuple[int, ...]
    num_features: int
    rope: RopeTable

    def first(self, ctx: BatchContext, features: Array) -> Array:
        """features (T, num_features) of the target, `ctx.token_ids` the tokens after theirs -> the
        head's own features (T, D).
        """
        ...

    def next(self, ctx: BatchContext, features: Array) -> Array:
        """The same from the head's own features (T, D)."""
        ...

    def logits(self, features: Array) -> Array:
        """The head's own features (R, D) -> (R, K)."""
        ...


class Eagle1Head(Layer):
    """EAGLE-1's and 2's. tensors: names that the checkpoint has."""

    family = "an EAGLE head"
    ignored: tuple[str, ...] = ("embed_tokens.weight", LM_HEAD, "*.rotary_emb.inv_freq")
    renames: tuple[tuple[str, str], ...] = ()
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        tensors: Collection[str],
        target: CausalLM,
        num_draft_tokens: int | None,
    ) -> None:
        """num_draft_tokens: rows of its own or a gathered lm_head; None: it uses the target's."""
        config.refuse("mlp_bias", "add_para_norm")
        shape = DecoderShape.read(config)
        _check_width(config, "hidden_size", shape.hidden, target)
        self.num_features = size = shape.hidden
        self.kv_heads = [(shape.kv_heads, shape.head_dim)] * shape.num_layers
        self.rope = RopeTable(shape.head_dim, config.rope(), shape.context)
        self._embed: Embed = target.embedding.__call__  # not a layer of its own
        # One product of both inputs side by side is the sum of two products.
        self.of_embedding = Linear({"fc": size}, size, columns=(0, 2 * size))
        has_bias = "fc.bias" in tensors
        self.of_feature = Linear({"fc": size}, size, has_bias=has_bias, columns=(size, 2 * size))
        self.blocks = [self._block(i, config, shape, tensors) for i in range(shape.num_layers)]
        self.head = DraftLogits(num_draft_tokens, size, target)

    def _block(
        self, index: int, config: ModelConfig, shape: DecoderShape, tensors: Collection[str]
    ) -> DecoderBlock:
        name = f"layers.{index}"
        norm = RMSNorm(f"{name}.input_layernorm", shape.hidden, shape.eps)
        return DecoderBlock(
            norm if index else None,
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                self.rope,
                qkv_bias=f"{name}.self_attn.q_proj.bias" in tensors,
                output_bias=f"{name}.self_attn.o_proj.bias" in tensors,
            ),
            RMSNorm(f"{name}.post_attention_layernorm", shape.hidden, shape.eps),
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, config.text("hidden_act", "silu")),
        )

    def first(self, ctx: BatchContext, features: Array) -> Array:
        x = add(self.of_feature(features), self.of_embedding(self._embed(ctx.token_ids)))
        for block in self.blocks:
            x = block(x, ctx)
        return x

    def next(self, ctx: BatchContext, features: Array) -> Array:
        return self.first(ctx, features)

    def logits(self, features: Array) -> Array:
        return self.head(features)


class Eagle3Head(Layer):
    """EAGLE-3's, with the names of `layers.0`."""

    family = "an EAGLE-3 head"
    renames: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        tensors: Collection[str],
        target: CausalLM,
        num_draft_tokens: int | None,
    ) -> None:
        """As Eagle1Head. The config may name the layers whose inputs make the features
        (`eagle_aux_hidden_state_layer_ids`); they are 2, n / 2 and n - 3 of n otherwise.
        """
        config.refuse("mlp_bias")
        shape = DecoderShape.read(config)
        if shape.num_layers != 1:
            raise config.error("num_hidden_layers", "1, as EAGLE-3 heads have it")
        width = config.integer("target_hidden_size", shape.hidden)
        _check_width(config, "target_hidden_size", width, target)
        self.taps = _taps(config, len(target.blocks))
        self.num_features = len(self.taps) * width
        self.kv_heads = [(shape.kv_heads, shape.head_dim)]
        self.rope = RopeTable(shape.head_dim, config.rope(), shape.context)
        self.ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
        size, name = shape.hidden, "layers.0"

        def norm(part: str) -> RMSNorm:
            return RMSNorm(part, size, shape.eps)

        self.embedding: Embedding | None = None
        self._embed: Embed = target.embedding.__call__
        if size == target.spec.hidden_size:
            self.ignored += ("embed_tokens.weight",)
        else:
            rows = config.integer("vocab_size")
            self.embedding = Embedding("embed_tokens.weight", rows, size)
            self._embed = self.embedding.__call__
        self.fc = Linear({"fc": size}, self.num_features, has_bias="fc.bias" in tensors)
        self.input_norm = norm(f"{name}.input_layernorm")
        self.hidden_norm = norm(f"{name}.hidden_norm")
        self.attention = Attention(
            f"{name}.self_attn",
            0,
            size,
            AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
            self.rope,
            qkv_bias=f"{name}.self_attn.q_proj.bias" in tensors,
            output_bias=f"{name}.self_attn.o_proj.bias" in tensors,
            columns=(size, 2 * size),
        )
        outputs = dict(zip("qkv", self.attention.columns, strict=True))
        self.of_embedding = Linear(
            {f"{name}.self_attn.{part}_proj": count for part, count in outputs.items()},
            size,
            columns=(0, 2 * size),
        )
        self.mlp_norm = norm(f"{name}.post_attention_layernorm")
        self.mlp = GatedMLP(f"{name}.mlp", size, shape.inner, config.text("hidden_act", "silu"))
        self.norm = norm("norm")
        self.head = DraftLogits(num_draft_tokens, size, target)
        self.adds_normed = config.flag("norm_before_residual", False)

    def first(self, ctx: BatchContext, features: Array) -> Array:
        return self.next(ctx, self.fc(features))

    def next(self, ctx: BatchContext, features: Array) -> Array:
        normed = self.hidden_norm(features)
        embedded = self.of_embedding(self.input_norm(self._embed(ctx.token_ids)))
        update = self.attention.attend(add(embedded, self.attention.qkv(normed)), ctx)
        x = add(normed if self.adds_normed else features, update)
        return add(x, self.mlp(self.mlp_norm(x)))

    def logits(self, features: Array) -> Array:
        return self.head(self.norm(features))


def _check_width(config: ModelConfig, key: str, size: int, target: CausalLM) -> None:
    if size != target.spec.hidden_size:
        raise config.error(
            key, f"the target's hidden size, {target.spec.hidden_size} ({size} is another model's)"
        )


def _taps(config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of the target whose outputs are wanted. Configs name those whose inputs they are: what
    comes into layer i is what layer i - 1 puts out.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.values.get(key) or config.mapping("eagle_config").get(key)
    if not ids:
        ids = [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list) or any(
        not isinstance(i, int) or not 0 < i <= num_layers for i in ids
    ):
        raise ConfigError(
            f"config.json: {key} must name layers from 1 to {num_layers} of the target, got {ids}; "
            "is this a head for another model?"
        )
    return tuple(i - 1 for i in ids)
