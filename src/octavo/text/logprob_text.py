"""How a token is named in log-probability entries."""

from __future__ import annotations

from typing import NamedTuple

from octavo.text.tokenizer import Tokenizer


class LogprobText(NamedTuple):
    token: str
    """The token's text; where it is part of a character, its bytes written as OpenAI does:
    bytes:\\xe6\\x98.
    """
    bytes: list[int]
    """The true UTF-8 bytes; those of consecutive entries join to the text."""


def logprob_text(tokenizer: Tokenizer, token_id: int) -> LogprobText:
    """`token` and `bytes` of a logprobs entry (OpenAI chat completions API,
    choices[].logprobs.content).
    """
    data = tokenizer.token_bytes(token_id)
    try:
        token = data.decode()
    except UnicodeDecodeError:
        token = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return LogprobText(token, list(data))
