from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.text.tokenizer import Tokenizer
from support.tiny_tokenizers import sentencepiece_pieces, text_assets, train_byte_level


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    backend = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_tokens(
        [tokenizers.AddedToken(t, normalized=False) for t in ("<tool_call>", "né", "<think> ")]
    )
    return backend


@pytest.fixture(scope="session")
def byte_level(byte_level_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(
        byte_level_backend,
        named_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    )


@pytest.fixture(scope="session")
def sentencepiece_gguf() -> dict[str, Any]:
    pieces = sentencepiece_pieces()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_gguf: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_assets(text_assets(gguf=sentencepiece_gguf))


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """SentencePiece as newer tokenizer.json files have it: Metaspace, first word only."""
    pieces = [piece for piece, _, _ in sentencepiece_pieces()]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(params=["byte_level", "sentencepiece", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer
