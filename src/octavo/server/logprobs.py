"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.core.errors import RequestError
from octavo.core.step import TokenLogprobs
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.logprob_text import logprob_text
from octavo.text.tokenizer import Tokenizer

# Of the candidates that a reply shows for its prompts' tokens; each is up to 100 bytes of JSON.
_MAX_PROMPT_CANDIDATES = 2_000_000
# JSON has no infinity; OpenAI writes this for a token that can't be.
_LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """choices[].logprobs of chat completions."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        token, data = logprob_text(tokenizer, token_id)
        return {"token": token, "logprob": max(logprob, _LEAST), "bytes": data}

    content = [
        {
            **named(entry.token_id, entry.logprob),
            "top_logprobs": [named(*candidate) for candidate in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """choices[].logprobs of completions, for one choice; text offsets go on from piece to piece."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        offset: int = 0,
    ) -> None:
        """prompt_ids: what goes before the tokens. offset: characters shown before them."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._offset = offset

    def take(
        self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """One entry per token; None for a prompt's first, which nothing predicts."""
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
            if entry is None:
                logprobs.append(None)
                tops.append(None)
                continue
            # The token itself is always there; of equal texts the likeliest is named.
            top: dict[str, float] = {}
            for candidate, logprob in (*entry.top, (token_id, entry.logprob)):
                top.setdefault(self._text(candidate), max(logprob, _LEAST))
            logprobs.append(max(entry.logprob, _LEAST))
            tops.append(top)
        return {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": [self._text(token_id) for token_id in token_ids],
            "top_logprobs": tops,
        }

    def _text(self, token_id: int) -> str:
        return logprob_text(self._tokenizer, token_id).token


def check_num_shown(num_tokens: int, num_times: int, num_top: int) -> None:
    """Raises RequestError if prompts of so many tokens would be shown too often, with too many
    candidates each.
    """
    num_shown = num_tokens * num_times * (num_top + 1)
    if num_shown > _MAX_PROMPT_CANDIDATES:
        raise RequestError(
            f"{num_tokens} prompt tokens, each with {num_top} candidates and shown {num_times} "
            f"times, are {num_shown} entries; ask for at most {_MAX_PROMPT_CANDIDATES}: lower "
            "prompt_logprobs or n, leave out echo, or send less",
            param="prompt_logprobs",
        )


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token {id: {logprob, rank, decoded_token}}."""

    def candidates(entry: TokenLogprobs) -> dict[str, Any]:
        ranked = [(token, logprob, i) for i, (token, logprob) in enumerate(entry.top, start=1)]
        return {
            str(token): {
                "logprob": max(logprob, _LEAST),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for token, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *ranked)
        }

    return [None if entry is None else candidates(entry) for entry in entries]
