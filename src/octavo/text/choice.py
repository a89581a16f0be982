"""One sequence of a request, from the engine's tokens to what a reply shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.request import FinishReason, Request
from octavo.core.step import TokenDelta, TokenLogprobs
from octavo.text.output import OutputText
from octavo.text.tokenizer import Tokenizer


class ChoicePiece(NamedTuple):
    """What one delta adds.

    token_ids, logprobs: those that count, i.e. up to the token that completed a stop string; text
    may lag behind them, or be cut before them. stop_reason: the stop string or stop token.
    must_stop: a stop string ended the text, but the engine does not know yet: tell it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    must_stop: bool


class Choice:
    """Takes a sequence's deltas in order. Once a stop string has ended it, further ones add nothing
    (the engine may be a step ahead).
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        sampling = request.sampling
        self.is_finished = False
        self._text = OutputText(
            tokenizer,
            request.prompt_token_ids,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def take(self, delta: TokenDelta) -> ChoicePiece | None:
        """None if the delta adds nothing because the choice is finished."""
        if self.is_finished:
            return None
        reason = delta.finish_reason
        added = self._text.push(
            delta.token_ids,
            final=reason is not None,
            ended_by_token=reason is FinishReason.STOP,
        )
        count = added.num_tokens_consumed
        stop_reason: str | int | None = delta.stop_token_id
        must_stop = False
        if added.stop_reason is not None:
            must_stop = reason is None
            reason, stop_reason = FinishReason.STOP, added.stop_reason
        self.is_finished = reason is not None
        logprobs: Sequence[TokenLogprobs] | None = delta.logprobs
        return ChoicePiece(
            added.text,
            delta.token_ids[:count],
            None if logprobs is None else tuple(logprobs[:count]),
            reason,
            stop_reason,
            must_stop,
        )
