"""A GGUF file as a checkpoint with Hugging Face names and conventions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.weights.checkpoint import TensorSpec, TextAssets
from octavo.weights.gguf_config import hf_config, hf_generation_config, token_id, tokens_of
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_names import stored_tensors


class GGUFCheckpoint:
    """A `Checkpoint` from one .gguf file; quantized tensors are dequantized when they are read."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Reads the metadata. ConfigError names what is broken or not supported."""
        self.name = name or path.stem
        self.path = path
        self._file = GGUFFile(path)
        self.config = hf_config(self._file)
        self.generation_config = hf_generation_config(self._file)
        self._stored = stored_tensors(
            self._file.metadata["general.architecture"],
            self._file.tensors,
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
        )
        self.tensors: dict[str, TensorSpec] = {}
        for hf_name, stored in self._stored.items():
            tensor = self._file.tensors[stored.name]
            if stored.num_rotary_heads and tensor.shape[0] % (2 * stored.num_rotary_heads):
                raise ConfigError(
                    f"{path}: tensor {tensor.name!r} of shape {list(tensor.shape)} does not divide "
                    f"into {stored.num_rotary_heads} heads"
                )
            dtype = _DTYPE_NAMES.get(tensor.type, tensor.type)
            self.tensors[hf_name] = TensorSpec(hf_name, tensor.shape, dtype)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name not in self._stored:
            raise ConfigError(
                f"{self.path} has no tensor {name!r}; the file does not fit its architecture"
            )
        stored = self._stored[name]
        order = stored.row_order(self.tensors[name].shape[0])
        if order is None:
            array = self._file.read(stored.name, rows)
        else:
            array = self._file.read(stored.name, order if rows is None else order[rows])
        return array - np.float32(stored.added) if stored.added else array

    def text_assets(self) -> TextAssets:
        metadata = self._file.metadata
        tokens = tokens_of(self._file)
        config: dict[str, Any] = {}
        for kind, hf in _SPECIAL_TOKENS.items():
            index = token_id(self._file, kind)
            if index is not None and index < len(tokens):
                config[hf] = tokens[index]
        for key, hf in _TOKENIZER_KEYS.items():
            if key in metadata:
                config[hf] = metadata[key]
        raw = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        return TextAssets(tokenizer_json=None, tokenizer_config=config, gguf=raw)


_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SPECIAL_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}
_TOKENIZER_KEYS = {
    "tokenizer.ggml.add_bos_token": "add_bos_token",
    "tokenizer.ggml.add_eos_token": "add_eos_token",
    "tokenizer.ggml.add_space_prefix": "add_prefix_space",
    "tokenizer.chat_template": "chat_template",
}
