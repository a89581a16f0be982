"""A GGUF file as a checkpoint with Hugging Face names and conventions."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError
from octavo.weights.checkpoint import TensorSpec, TextAssets
from octavo.weights.gguf_architectures import GGUF_ARCHITECTURES
from octavo.weights.gguf_config import hf_config, hf_generation_config, token_id, tokens_of
from octavo.weights.gguf_header import GGUFHeader
from octavo.weights.gguf_names import StoredTensor, stored_tensors
from octavo.weights.mapped_file import content_digest, release_pages

if TYPE_CHECKING:
    import numpy as np

    from octavo.quantization.grouped import GroupedTensor
    from octavo.weights.gguf_file import GGUFFile


class GGUFCheckpoint:
    """A `Checkpoint` from one .gguf file. Of quantized tensors it gives blocks, or float32."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Reads the metadata. ConfigError names what is broken or not supported."""
        self.name = name or path.stem
        self.path = path
        self._header = GGUFHeader(path)
        self.config = hf_config(self._header)
        self.generation_config = hf_generation_config(self._header)
        self._stored = stored_tensors(
            GGUF_ARCHITECTURES[self._header.metadata["general.architecture"]],
            self._header.tensors,
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
            self.config.get("num_local_experts", 0),
        )
        self.tensors: dict[str, TensorSpec] = {}
        for hf_name, stored in self._stored.items():
            tensor = self._header.tensors[stored.name]
            if stored.num_rotary_heads and tensor.shape[0] % (2 * stored.num_rotary_heads):
                raise ConfigError(
                    f"{path}: tensor {tensor.name!r} of shape {list(tensor.shape)} does not divide "
                    f"into {stored.num_rotary_heads} heads"
                )
            dtype = _DTYPE_NAMES.get(tensor.type, tensor.type)
            shape = tensor.shape if stored.matrix is None else tensor.shape[1:]
            self.tensors[hf_name] = TensorSpec(
                hf_name, (1, *shape) if stored.is_row else shape, dtype
            )

    @cached_property
    def _file(self) -> GGUFFile:
        from octavo.weights.gguf_file import GGUFFile  # and numpy: only for those who read tensors

        return GGUFFile(self._header)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        import numpy as np

        stored, index = self._place(name, rows)
        if stored.is_row:
            return self._file.read(stored.name)[None][slice(None) if rows is None else rows]
        array = self._file.read(stored.name, index, stored.matrix)
        return array - np.float32(stored.added) if stored.added else array

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray:
        stored, index = self._place(name, rows)
        if self.tensors[name].dtype in _DTYPE_NAMES.values():
            return self.read(name, rows)
        return self._file.read_stored(stored.name, index, stored.matrix)

    def grouped(self, name: str) -> GroupedTensor | None:
        spec = self.tensors[name]
        if spec.dtype != "MXFP4" or len(spec.shape) < 2:
            return None
        from octavo.weights.gguf_mxfp4 import MXFP4Blocks

        def rows_of_all(rows: slice) -> np.ndarray:
            stored = self.read_stored(name)
            return stored.reshape(-1, stored.shape[-1])[rows]

        return MXFP4Blocks(partial(self.read_stored, name) if len(spec.shape) == 2 else rows_of_all)

    def _place(
        self, name: str, rows: slice | None
    ) -> tuple[StoredTensor, slice | np.ndarray | None]:
        """Which of the file's tensors has these rows, and where."""
        if name not in self._stored:
            raise ConfigError(
                f"{self.path} has no tensor {name!r}; the file does not fit its architecture"
            )
        stored = self._stored[name]
        order = stored.row_order(self.tensors[name].shape[0])
        if order is None:
            return stored, rows
        return stored, order if rows is None else order[rows]

    def release_pages(self) -> None:
        release_pages(self._header.buffer)

    def content_id(self) -> str:
        return content_digest([(self.path, self._header.buffer)])

    def text_assets(self) -> TextAssets:
        metadata = self._header.metadata
        tokens = tokens_of(self._header)
        config: dict[str, Any] = {}
        for kind, hf in _SPECIAL_TOKENS.items():
            index = token_id(self._header, kind)
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
