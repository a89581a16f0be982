"""Checkpoints of draft heads: few tensors, which lean on the target's for the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import ConfigError
from octavo.layers.layer import Layer, Weight
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import Weighted, load_weights, plan_weights
from octavo.ops import Array, linear
from octavo.quantization.grouped import GroupedTensor
from octavo.speculative.registry import Target
from octavo.weights import Checkpoint, TensorSpec
from octavo.weights.model_config import ModelConfig

LM_HEAD = "lm_head.weight"


def draft_token_ids(
    checkpoint: Checkpoint, config: ModelConfig, target: Target
) -> np.ndarray | None:
    """The tokens that a head guesses among, (K,) int64; None if these are all.

    EAGLE-3 keeps them as `d2t` (K,): token id = i + d2t[i] (its code, and vLLM's llama_eagle3.py);
    vLLM's Medusa as `token_map` (K,): the ids themselves. Raises ConfigError for ids that the
    tokenizer hasn't, and if the config names another number of them.
    """
    names = {name.rpartition(".")[2]: name for name in checkpoint.tensors}
    key, token_ids = "draft_vocab_size", None
    if "d2t" in names:
        offsets = checkpoint.read(names["d2t"]).astype(np.int64).ravel()
        token_ids = np.arange(len(offsets)) + offsets
    elif "token_map" in names:
        key = "truncated_vocab_size"
        token_ids = checkpoint.read(names["token_map"]).astype(np.int64).ravel()
    if token_ids is None:
        num_tokens = config.integer("vocab_size", target.model.vocab_size)
    else:
        num_tokens = len(token_ids)
    if config.integer(key, num_tokens) != num_tokens:
        raise ConfigError(
            f"{checkpoint.name}: its config has {key} {config.integer(key)}, but its tensors name "
            f"{num_tokens} tokens (d2t or token_map; all without); fetch the head again"
        )
    if token_ids is not None and (
        len(np.unique(token_ids)) != num_tokens
        or token_ids.min() < 0
        or token_ids.max() >= target.vocab_size
    ):
        raise ConfigError(
            f"{checkpoint.name}: the tokens that it guesses among (d2t or token_map) are not "
            f"different ids below {target.vocab_size}; it is a head for another model"
        )
    return token_ids


class HeadCheckpoint:
    """A head's tensors under the names that its layers ask for, and perhaps rows of the target's
    head. A `models.loader.Checkpoint`.
    """

    def __init__(self, stored: Checkpoint, rename: Callable[[str], str | None]) -> None:
        """rename: from a stored name to what it is called here; None leaves the tensor out. Raises
        ConfigError for two tensors that are called the same.
        """
        self.name = stored.name
        self._stored = stored
        self._names: dict[str, str] = {}
        for old in stored.tensors:
            if (new := rename(old)) is None:
                continue
            if new in self._names:
                raise ConfigError(
                    f"{stored.name}: {self._names[new]} and {old} are both {new} of the head; "
                    "remove the one that is not meant from the file"
                )
            self._names[new] = old
        self._tensors = {
            new: replace(stored.tensors[old], name=new) for new, old in self._names.items()
        }
        self._target: Checkpoint | None = None
        self._target_name = ""
        self._rows = np.empty(0, np.int64)

    def take_target_head(self, target: Checkpoint, model: CausalLM, rows: np.ndarray) -> None:
        """Let LM_HEAD be these rows of the target's head."""
        (name,) = model.head.weight.names
        spec = target.tensors[name]
        self._target, self._target_name, self._rows = target, name, rows
        self._tensors[LM_HEAD] = TensorSpec(LM_HEAD, (len(rows), *spec.shape[1:]), spec.dtype)

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name == LM_HEAD and self._target is not None:
            return self._rows_of_target(self._target.read, rows)
        return self._stored.read(self._names[name], rows)

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name == LM_HEAD and self._target is not None:
            return self._rows_of_target(self._target.read_stored, rows)
        return self._stored.read_stored(self._names[name], rows)

    def grouped(self, name: str) -> GroupedTensor | None:
        """Heads are floats, and what is taken of the target's head is read row by row."""
        return None

    def content_id(self) -> str:
        content = self._stored.content_id()
        if self._target is not None:
            rows = hashlib.sha256(self._rows.tobytes()).hexdigest()
            content += f" {self._target.content_id()} {rows}"
        return content

    def _rows_of_target(
        self, read: Callable[[str, slice], np.ndarray], rows: slice | None
    ) -> np.ndarray:
        """Row by row: the whole of a quantized head would be large as floats."""
        wanted = self._rows if rows is None else self._rows[rows]
        return np.concatenate([read(self._target_name, slice(i, i + 1)) for i in wanted.tolist()])


class DraftLogits(Layer):
    """features (R, D) -> logits (R, K), by a weight of its own, or else the target's.

    own_rows: K, None for the target's weight. size: D.
    """

    def __init__(self, own_rows: int | None, size: int, target: CausalLM) -> None:
        self.weight: Weight | None = None
        if own_rows is not None:
            self.weight = Weight(LM_HEAD, shape=(own_rows, size), role="head")
        self._shared = (target.head,)  # in a tuple: not among the head's own weights

    def __call__(self, features: Array) -> Array:
        if self.weight is not None:
            return linear(features, self.weight.array)
        (head,) = self._shared
        return head.gathered(linear(features, head.weight.array))


def load_head(head: Weighted, checkpoint: HeadCheckpoint, target: Target) -> None:
    """Give a head its weights, in the target's formats: as floats as they are stored, or quantized
    as the target is. Raises ConfigError that names missing and unexpected tensors.
    """
    quantization = target.quantization
    stored = {str(tensor.dtype) for tensor in target.checkpoint.tensors.values()}
    if target.dtype == "stored" and not stored <= BYTES_PER_VALUE.keys():
        quantization = "int8"  # the target is quantized already
    plan = plan_weights(head, checkpoint, target.backend, target.dtype, quantization)
    load_weights(head, plan)
