"""A folder as Hugging Face models come: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

import json
import os
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.grouped import GroupedTensor
from octavo.weights.checkpoint import TensorSpec, TextAssets
from octavo.weights.mapped_file import content_digest, release_pages
from octavo.weights.safetensors_file import SafetensorsFile

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NO_PICKLES = (
    "Octavo never opens pickle files (they can run code): use a safetensors or GGUF version of "
    "the model, or convert this one with transformers' save_pretrained"
)


class SafetensorsFolder:
    """A `Checkpoint` from a local folder."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Reads config and headers, no weights. ConfigError says what is missing or broken."""
        self.name = name or path.resolve().name
        self.path = path
        if not path.is_dir():
            raise ConfigError(f"the model folder {path} does not exist; check the path")
        files = _weight_files(path)
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"the model folder {path} has weights but no config.json; copy it from the "
                "model's repository"
            )
        self.config = read_json_object(path / "config.json")
        self.generation_config = _read_if_present(path / "generation_config.json")
        self.tensors: dict[str, TensorSpec] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, files):
            for tensor in file.tensors.values():
                if tensor.name in self._file_of:
                    other = self._file_of[tensor.name].path.name
                    raise ConfigError(
                        f"{path}: tensor {tensor.name!r} is in {other} and again in "
                        f"{file.path.name}; remove the file that does not belong to the model"
                    )
                self._file_of[tensor.name] = file
                self.tensors[tensor.name] = tensor
        self._check_index()

    def __reduce__(self) -> tuple[type[SafetensorsFolder], tuple[Path, str]]:
        return SafetensorsFolder, (self.path, self.name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name not in self._file_of:
            raise ConfigError(
                f"{self.path} has no tensor {name!r}; the model's files are incomplete"
            )
        return self._file_of[name].read(name, rows)

    read_stored = read

    def grouped(self, name: str) -> GroupedTensor | None:
        return None

    def release_pages(self) -> None:
        for _, buffer in self._buffers():
            release_pages(buffer)

    def content_id(self) -> str:
        return content_digest(self._buffers())

    def _buffers(self) -> list[tuple[Path, mmap]]:
        return sorted({file.path: file.buffer for file in self._file_of.values()}.items())

    def text_assets(self) -> TextAssets:
        tokenizer_json = self.path / "tokenizer.json"
        merged = {
            **_read_if_present(self.path / "special_tokens_map.json"),
            **_read_if_present(self.path / "tokenizer_config.json"),
        }
        for key, value in merged.items():
            # An AddedToken object, whose text is what the chat template and the tokenizer look for.
            if key.endswith("_token") and isinstance(value, dict):
                merged[key] = value.get("content")
        template = self.path / "chat_template.jinja"
        if template.is_file():
            merged["chat_template"] = read_text(template)
        return TextAssets(tokenizer_json if tokenizer_json.is_file() else None, merged, gguf=None)

    def _check_index(self) -> None:
        if not (self.path / _INDEX).is_file():
            return
        missing = [name for name in _weight_map(self.path) if name not in self.tensors]
        if missing:
            raise ConfigError(
                f"{self.path / _INDEX} names {len(missing)} tensors that its files lack, the "
                f"first is {missing[0]!r}; download the model again"
            )


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; ConfigError says why there are none."""
    single = folder / _SINGLE
    if single.is_dir():
        raise ConfigError(
            f"{single} is a folder, not a safetensors file; move its content to {folder}"
        )
    if single.is_file():
        return [single]
    if (folder / _INDEX).is_file():
        shards = sorted(set(_weight_map(folder).values()))
        # Path.is_file raises for names that no file can have, such as one of 5,000 characters.
        missing = [shard for shard in shards if not os.path.isfile(folder / shard)]
        if missing:
            raise ConfigError(
                f"the model folder {folder} lacks {len(missing)} of the {len(shards)} files that "
                f"{_INDEX} names: {', '.join(missing[:5])}; download the model again"
            )
        return [folder / shard for shard in shards]
    found = sorted(file for file in folder.iterdir() if file.is_file())
    candidates = [file for file in found if file.suffix == ".safetensors"]
    if len(candidates) == 1:
        return candidates
    if candidates:
        raise ConfigError(
            f"the model folder {folder} has {len(candidates)} safetensors files but no {_INDEX}; "
            "download the model again"
        )
    raise ConfigError(_why_no_weights(folder, found))


def _why_no_weights(folder: Path, found: list[Path]) -> str:
    if not any(folder.iterdir()):
        return f"the model folder {folder} is empty; download the model again"
    if ggufs := [file for file in found if file.suffix == ".gguf"]:
        return (
            f"the model folder {folder} has no safetensors weights; pass a GGUF file itself: "
            f"{ggufs[0]}"
        )
    if pickles := [file for file in found if file.suffix in PICKLE_SUFFIXES]:
        return f"the model folder {folder} has weights only as {pickles[0].name}. {NO_PICKLES}"
    return f"the model folder {folder} has no weights (*.safetensors); download the model again"


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name. File names are untrusted: none may lead out of the folder."""
    index = folder / _INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map; download the model again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index} puts tensor {name!r} into {file!r}, which is no file name")
    return weight_map


def read_json_object(path: Path) -> dict[str, Any]:
    """ConfigError with path and position unless the file is one JSON object."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is broken JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); download it again") from error


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
