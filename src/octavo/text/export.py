"""A model's tokenizer and chat template, as files of a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from octavo.text.gguf_tokenizer import GGUFKeys, tokenizer_from_gguf
from octavo.weights import Checkpoint

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy what a folder has, or write what a GGUF file says. Raises ConfigError for a tokenizer
    that is not known.
    """
    if checkpoint.path.is_dir():
        for name in _FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
        return
    assets = checkpoint.text_assets()
    if assets.gguf is not None and "tokenizer.ggml.tokens" in assets.gguf:
        tokenizer_from_gguf(GGUFKeys(assets.gguf)).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **assets.tokenizer_config}
        _write_json(folder / "tokenizer_config.json", config)
    if checkpoint.generation_config:
        _write_json(folder / "generation_config.json", checkpoint.generation_config)


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
