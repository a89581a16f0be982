"""The language model of a checkpoint that has other parts, too: those for images stay unread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.weights.checkpoint import Checkpoint, TensorSpec, TextAssets

if TYPE_CHECKING:
    import numpy as np

    from octavo.quantization.grouped import GroupedTensor

_WHOLES = ("gemma3", "llama4", "mistral3")
_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
}
"""By model types: of the whole, and of its language model."""

# As files have them: transformers from 4.52 on may write those of the second line.
_OURS = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_OTHERS = tuple(
    start + part
    for start in ("", "model.")
    for part in ("vision_tower.", "vision_model.", "multi_modal_projector.")
)
_HEAD = "lm_head.weight"
_FROM_THE_WHOLE = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype")


def has_other_parts(config: Mapping[str, Any]) -> bool:
    """Whether `LanguageModel` is for it."""
    inner = config.get("text_config")
    return (
        config.get("model_type") in _WHOLES
        and isinstance(inner, Mapping)
        and inner.get("model_type") in _ARCHITECTURES
    )


class LanguageModel:
    """A `Checkpoint`: the config and the tensors of the language model alone."""

    def __init__(self, whole: Checkpoint) -> None:
        """whole: `has_other_parts` says yes to its config."""
        self.name = whole.name
        self.path: Path = whole.path
        self.generation_config = whole.generation_config
        self._whole = whole
        self._stored = {
            _our_name(name): name for name in whole.tensors if not name.startswith(_OTHERS)
        }
        self.num_left_out = len(whole.tensors) - len(self._stored)
        inner: Mapping[str, Any] = whole.config["text_config"]
        self.config: dict[str, Any] = {
            **inner,
            **{key: whole.config[key] for key in _FROM_THE_WHOLE if whole.config.get(key)},
            "architectures": [_ARCHITECTURES[inner["model_type"]]],
            # Configs contradict themselves: what is tied is not in the files.
            "tie_word_embeddings": _HEAD not in self._stored,
        }

    def __reduce__(self) -> tuple[type[LanguageModel], tuple[Checkpoint]]:
        return LanguageModel, (self._whole,)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {name: self._whole.tensors[stored] for name, stored in self._stored.items()}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._whole.read(self._stored.get(name, name), rows)

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._whole.read_stored(self._stored.get(name, name), rows)

    def grouped(self, name: str) -> GroupedTensor | None:
        return self._whole.grouped(self._stored[name])

    def release_pages(self) -> None:
        self._whole.release_pages()

    def content_id(self) -> str:
        return self._whole.content_id()

    def text_assets(self) -> TextAssets:
        return self._whole.text_assets()


def _our_name(name: str) -> str:
    for theirs, ours in _OURS:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
