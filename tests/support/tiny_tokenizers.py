"""Tiny tokenizers, trained in the test: one of each kind that Octavo reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from octavo.text.pieces import byte_alphabet
from octavo.text.tokenizer import Tokenizer
from octavo.weights import TextAssets

CORPUS = [
    "The quick brown fox jumps over the lazy dog, user and assistant say hello hello hello.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 345))\t# it's DON'T we'll they've",
    "你好世界 鼠标 私の犬 是的 한국어 ďáb naïve café 🌶️ ☕ 👩‍👩‍👧",
    "<|im_start|>system\nYou are helpful<|im_end|>",
] * 4
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def text_assets(
    tokenizer_json: Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    gguf: Mapping[str, Any] | None = None,
) -> TextAssets:
    """What octavo.weights hands over, without reading a model."""
    return TextAssets(tokenizer_json, tokenizer_config or {}, gguf)


def train_byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_pieces() -> list[tuple[str, float, int]]:
    """(piece, score, GGUF token type); scores fall with the index, as SentencePiece trains BPE."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, min_frequency=2)
    words = [word for line in CORPUS for word in (" " + line).replace(" ", "  ").split(" ") if word]
    trained.train_from_iterator([" " + word for word in words], trainer)
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    kept = [p for p, _ in pieces if not set(p) & set("私犬鼠🌶☕") and "\u200d" not in p]
    joined = [p for p in kept if len(p) > 1]
    single = [p for p in kept if len(p) == 1]
    return [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *((piece, -float(i), 1) for i, piece in enumerate(joined)),
        *((piece, -float(len(joined) + i), 1) for i, piece in enumerate(single)),
    ]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte, so that every character is split."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    sentencepiece = tokenizer.strips_leading_space
    names = (f"<0x{byte:02X}>" if sentencepiece else letters[byte] for byte in data)
    return [i for name in names if (i := tokenizer.token_to_id(name)) is not None]
