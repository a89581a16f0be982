"""From the word that the user typed to a checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.language_model import LanguageModel, has_other_parts

if TYPE_CHECKING:
    from octavo.weights.safetensors_folder import SafetensorsFolder

DEFAULT = "default"
_FORMS = (
    "pass a folder with config.json and *.safetensors, a .gguf file, a hub id (org/name), a GGUF "
    f"file on the hub (org/name/file.gguf), or {DEFAULT!r}"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")


def open_model(config: ModelConfig) -> Checkpoint:
    """The configured model's files; fetched if need be. Raises ConfigError."""
    return open_checkpoint(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        token=config.hf_token,
    )


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
) -> Checkpoint:
    """Opens "default", a local folder or .gguf file, a hub id, or org/name/file.gguf on the hub.

    Reads metadata only; tensors are read one by one later. What exists locally wins over the hub.
    `revision`, `download_dir` and `token` are for the hub. Raises ConfigError, one sentence with
    the remedy.
    """
    from octavo.weights.gguf_checkpoint import GGUFCheckpoint

    if model == DEFAULT:
        from octavo.weights import default_model

        checkpoint = GGUFCheckpoint(default_model.fetch(), default_model.NAME)
        checkpoint.generation_config |= default_model.GENERATION_CONFIG
        return checkpoint
    if not model:
        raise ConfigError(f"the model has no name; {_FORMS}")
    path = Path(os.path.expanduser(model))  # Path.expanduser raises for a user that is not there
    if path.is_file() and path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    # Not at the top: it loads numpy, which GGUF's metadata does without.
    from octavo.weights.safetensors_folder import NO_PICKLES, PICKLE_SUFFIXES, SafetensorsFolder

    if path.is_dir():
        return _opened(SafetensorsFolder(path))
    if path.is_file():
        if path.suffix in PICKLE_SUFFIXES:
            raise ConfigError(f"{path} is a pickle file. {NO_PICKLES}")
        if path.suffix == ".safetensors":
            raise ConfigError(
                f"{path} is only the weights; pass the folder it is in, {path.parent}"
            )
        raise ConfigError(f"{path} is no model that Octavo knows; {_FORMS}")
    if model.startswith(("/", ".", "~")):
        raise ConfigError(f"the model path {model} does not exist; check the path")
    from octavo.weights import hub

    if gguf := _HUB_GGUF.fullmatch(model):
        file = hub.download_gguf(
            gguf[1], gguf[2], revision=revision, download_dir=download_dir, token=token
        )
        return GGUFCheckpoint(file, model)
    if model.endswith(".gguf"):
        raise ConfigError(f"the model file {model} does not exist; check the path")
    if _HUB_ID.fullmatch(model):
        folder = hub.download_model(
            model, revision=revision, download_dir=download_dir, token=token
        )
        return _opened(SafetensorsFolder(folder, model))
    raise ConfigError(f"there is no model {model!r}; {_FORMS}")


def _opened(folder: SafetensorsFolder) -> Checkpoint:
    from octavo.weights.quantized_checkpoint import QuantizedCheckpoint, quantization_of

    quantization = quantization_of(folder)
    checkpoint: Checkpoint = folder
    if quantization is not None:
        checkpoint = QuantizedCheckpoint(folder, quantization)
    return LanguageModel(checkpoint) if has_other_parts(folder.config) else checkpoint
