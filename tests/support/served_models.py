"""Models for a scripted server that begin texts and cut words in different ways."""

from __future__ import annotations

from functools import cache

from tokenizers import pre_tokenizers

from octavo.text.chat_template import ChatTemplate
from octavo.text.served_model import ServedModel
from octavo.text.tokenizer import Tokenizer
from support.scripted import CHATML, byte_model, sentencepiece_model
from support.tiny_tokenizers import train_byte_level

TOKENIZERS = ("bytes", "byte_level_bpe", "sentencepiece")


@cache
def model_named(name: str) -> ServedModel:
    """With one of TOKENIZERS; the last begins texts with BOS."""
    if name == "bytes":
        return byte_model()
    if name == "sentencepiece":
        return sentencepiece_model()
    backend = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer(backend, named_tokens={"eos_token": "<|im_end|>"})
    return byte_model(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset(tokenizer.eos_ids),
        chat_template=ChatTemplate(CHATML, tokenizer),
    )
