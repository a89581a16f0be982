"""The layers of Medusa's heads, as their checkpoints have them.

Head h guesses the token that comes h + 1 places after the one which the target's own head gives. On
the target's state x after its final norm it is x + SiLU(W x + b), once or several times, and then a
head over the vocabulary (arXiv 2401.10774, section 2.2.1).

Medusa's own files (FasterDecoding/Medusa, medusa_model.py) call layer l of head h `h.l.linear`, and
the head's last product `h.L`, with L layers; vLLM's (medusa.py) call them `blocks.h.layers.l` and
`lm_heads.h`, or have one `lm_heads.0` for all (`original_lm_head`). Here none at all is allowed
too: then the target's own head is it.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.layers.layer import Layer, Weight
from octavo.layers.linear import Linear
from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, add, linear, silu, split_columns
from octavo.speculative.head_checkpoint import LM_HEAD, DraftLogits
from octavo.weights.model_config import ModelConfig

MAX_HEADS = 64


class MedusaHeads(Layer):
    """A `models.loader.Weighted`, with vLLM's names.

    num_heads: H. lm_heads: each head's own last product, or none, where all share `shared`.
    """

    family = "Medusa heads"
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        tensors: Collection[str],
        target: CausalLM,
        num_draft_tokens: int | None,
    ) -> None:
        """tensors: names that the checkpoint has. num_draft_tokens: K, rows of lm_heads, or of one
        for all; None: of all tokens.
        """
        size = target.spec.hidden_size
        if config.integer("hidden_size", size) != size:
            raise config.error("hidden_size", f"the target's hidden size, {size}")
        self.num_heads = _count(config, "medusa_num_heads", "num_heads")
        self.num_layers = _count(config, "medusa_num_layers", "num_hidden_layers")
        self.size = size
        has_bias = "blocks.0.layers.0.bias" in tensors

        def product(heads: range, layer: int) -> Linear:
            outputs = {f"blocks.{head}.layers.{layer}": size for head in heads}
            return Linear(outputs, size, has_bias=has_bias)

        # All heads' first layers see the same state.
        self.first = product(range(self.num_heads), 0)
        self.further = [
            product(range(head, head + 1), layer)
            for head in range(self.num_heads)
            for layer in range(1, self.num_layers)
        ]
        rows = target.spec.vocab_size if num_draft_tokens is None else num_draft_tokens
        self.lm_heads: list[Weight] = []
        if any(name.startswith("lm_heads.") for name in tensors):
            self.lm_heads = [
                Weight(f"lm_heads.{head}.weight", shape=(rows, size), role="head")
                for head in range(self.num_heads)
            ]
        own_rows = rows if LM_HEAD in tensors else None
        self.shared = DraftLogits(own_rows, size, target)

    def states(self, x: Array) -> tuple[Array, ...]:
        """x (R, D) -> what each head puts into its last product, (R, D) each."""
        updates = split_columns(silu(self.first(x)), (self.size,) * self.num_heads)
        states = []
        for head, update in enumerate(updates):
            state = add(x, update)
            start = head * (self.num_layers - 1)
            for layer in self.further[start : start + self.num_layers - 1]:
                state = add(state, silu(layer(state)))
            states.append(state)
        return tuple(states)

    def own_logits(self, x: Array) -> tuple[Array, ...]:
        """x (R, D) -> each head's logits (R, K), by `lm_heads`."""
        return tuple(
            linear(state, weight.array)
            for state, weight in zip(self.states(x), self.lm_heads, strict=True)
        )


def _count(config: ModelConfig, *keys: str) -> int:
    """By whichever of the keys there is, Medusa's or vLLM's."""
    key = next((key for key in keys if config.values.get(key) is not None), keys[0])
    return config.integer(key, high=MAX_HEADS)
