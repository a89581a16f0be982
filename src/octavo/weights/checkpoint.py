"""What the rest of Octavo sees of a model on disk: one kind of object, whatever the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from octavo.quantization.grouped import GroupedTensor


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint, before it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As stored: a numpy or ml_dtypes name ("float32", "bfloat16"), or that of a quantized format:
    a GGUF type ("Q4_1"), or another ("GPTQ 4-bit").
    """


@dataclass(frozen=True)
class TextAssets:
    """What a tokenizer and a chat template are made from."""

    tokenizer_json: Path | None
    """Hugging Face's tokenizer.json, where there is one."""
    tokenizer_config: Mapping[str, Any]
    """Keys of tokenizer_config.json: special tokens as plain strings, chat_template in force."""
    gguf: Mapping[str, Any] | None
    """For GGUF files: all metadata under "tokenizer.", by full key ("tokenizer.ggml.tokens")."""


class Checkpoint(Protocol):
    """Weights and metadata of one model, with Hugging Face's names and conventions.

    Can be pickled for another process, which maps the same files; `text_assets` is for the one that
    opened them.
    """

    name: str
    """For messages and /v1/models: the hub id, or the name of the folder or file."""
    path: Path
    config: dict[str, Any]
    """Keys of config.json as transformers writes them (rope_parameters, layer_types, ...)."""
    generation_config: dict[str, Any]
    """Keys of generation_config.json; empty where the model has none."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or only `rows` of its first axis, from the pages that hold them.

        Types that numpy or ml_dtypes have come as stored; quantized ones as float32.
        The array may share memory with the mapped file: writing to it never reaches the file.
        May be called from several threads at once. Raises ConfigError for a name not in `tensors`.
        """
        ...

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray:
        """As `read`, but GGUF's quantized types come in their blocks: (rows, bytes of a row) uint8.

        For tensors of two axes.
        """
        ...

    def grouped(self, name: str) -> GroupedTensor | None:
        """The tensor as codes and scales, if that is how it is stored."""
        ...

    def release_pages(self) -> None:
        """Give back the memory of what was read; arrays from `read` stay valid."""
        ...

    def content_id(self) -> str:
        """A text that is another one when the weights are (see `content_digest`)."""
        ...

    def text_assets(self) -> TextAssets: ...
