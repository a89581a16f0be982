from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import require_same_vocabulary
from octavo.weights import TextAssets
from support.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer
from support.tiny_tokenizers import text_assets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Tokenizer:
    return Tokenizer.from_assets(text_assets(folder / "tokenizer.json"))


def changed(folder: Path, to: Path, changes: dict[str, str | None]) -> TextAssets:
    """The tokenizer with some pieces written otherwise, or left out."""
    content = json.loads((folder / "tokenizer.json").read_text())

    def new(piece: str) -> str | None:
        return changes.get(piece, piece)

    model = content["model"]
    model["vocab"] = {new(piece): i for piece, i in model["vocab"].items() if new(piece)}
    model["merges"] = []
    content["added_tokens"] = [
        {**token, "content": new(token["content"])}
        for token in content["added_tokens"]
        if new(token["content"])
    ]
    path = to / "tokenizer.json"
    path.write_text(json.dumps(content))
    return text_assets(path)


def piece(tokenizer: Tokenizer, token_id: int) -> str:
    return next(text for text, i in tokenizer.vocabulary().items() if i == token_id)


def test_the_same_tokenizer_is_the_same(folder: Path, target: Tokenizer) -> None:
    # Which token ends a text, and how chats look, is the target's affair.
    draft = text_assets(folder / "tokenizer.json", {"eos_token": SPECIAL_TOKENS[0]})
    require_same_vocabulary(target, draft, "small", vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("token_id", [2, 40, 300])
def test_another_text_for_an_id_is_named(
    tmp_path: Path, folder: Path, target: Tokenizer, token_id: int
) -> None:
    text = piece(target, token_id)
    draft = changed(folder, tmp_path, {text: "novel"})
    with pytest.raises(ConfigError) as error:
        require_same_vocabulary(target, draft, "org/small", vocab_size=VOCAB_SIZE)
    said = str(error.value)
    assert "the draft model org/small has another vocabulary than the target" in said
    assert f"token {token_id} is 'novel' instead of {text!r}, and 1 of {VOCAB_SIZE} ids" in said


def test_a_missing_id_is_named(tmp_path: Path, folder: Path, target: Tokenizer) -> None:
    last = VOCAB_SIZE - 1
    draft = changed(folder, tmp_path, {piece(target, last): None})
    with pytest.raises(ConfigError, match=rf"token {last} is missing instead of "):
        require_same_vocabulary(target, draft, "small", vocab_size=VOCAB_SIZE)
    # Where the target's own output layer lacks the row, nobody misses it.
    require_same_vocabulary(target, draft, "small", vocab_size=last)


def test_what_the_draft_model_knows_beyond_is_no_difference(
    tmp_path: Path, folder: Path, target: Tokenizer
) -> None:
    smaller = changed(folder, tmp_path, {piece(target, VOCAB_SIZE - 1): None})
    draft = text_assets(folder / "tokenizer.json")
    require_same_vocabulary(
        Tokenizer.from_assets(smaller), draft, "small", vocab_size=VOCAB_SIZE - 1
    )


def test_rows_that_a_gguf_file_is_padded_with_are_no_tokens(
    sentencepiece_gguf: dict[str, Any],
) -> None:
    size = len(sentencepiece_gguf["tokenizer.ggml.tokens"])
    padded = sentencepiece_gguf | {
        f"tokenizer.ggml.{key}": sentencepiece_gguf[f"tokenizer.ggml.{key}"] + more
        for key, more in {
            "tokens": [f"[PAD{size}]", f"[PAD{size + 1}]"],
            "scores": [0.0, 0.0],
            "token_type": [5, 5],
        }.items()
    }
    target = Tokenizer.from_assets(text_assets(gguf=padded))
    draft = text_assets(gguf=sentencepiece_gguf)
    require_same_vocabulary(target, draft, "small", vocab_size=target.vocab_size)
