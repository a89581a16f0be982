"""From the engine's tokens to what a reply says: text, stop strings, usage, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import NamedTuple

from octavo.core.clock import Clock
from octavo.core.errors import EngineDeadError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.request_metrics import RequestMetrics, request_metrics
from octavo.core.step import TokenDelta, TokenLogprobs
from octavo.engine.client import RequestStream
from octavo.server.errors import SERVER_ERROR, sanitized
from octavo.server.metrics import Metrics
from octavo.server.request_record import RequestRecord
from octavo.text.choice import Choice
from octavo.text.tokenizer import Tokenizer

LARGE_LOGPROBS = 500
"""Candidates from which on they are shown beside the event loop; each takes some microseconds."""


class Piece(NamedTuple):
    """What one engine step adds to one of the reply's choices.

    choice: prompt number times n plus the sequence's number. token_ids: those that count, i.e. up
    to the one that completed a stop string; text may lag behind them, or be cut before them.
    prompt_logprobs: on a choice's first piece. stop_reason: the stop string or stop token.
    """

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None

    @property
    def is_large(self) -> bool:
        return are_large((self,))


def are_large(pieces: Iterable[Piece]) -> bool:
    """Whether showing their log-probabilities would hold the event loop up for long."""
    num_candidates = 0
    for piece in pieces:
        for entry in chain(piece.logprobs or (), piece.prompt_logprobs or ()):
            num_candidates += 1 if entry is None else 1 + len(entry.top)
            if num_candidates >= LARGE_LOGPROBS:
                return True
    return False


class Usage:
    """Tokens of one reply, summed over its prompts and choices."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0

    def body(self, completion_tokens: int | None = None) -> dict[str, object]:
        """completion_tokens: of a part of the reply; None is all that have come."""
        if completion_tokens is None:
            completion_tokens = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Prompt:
    """One prompt's request while it runs. num_tokens, num_cached: its part of the usage. num_ended:
    sequences.
    """

    def __init__(
        self,
        request: Request,
        stream: RequestStream,
        record: RequestRecord,
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.stream = stream
        self.record = record
        self.choices = [Choice(tokenizer, request) for _ in range(request.sampling.n)]
        self.unstarted = set(range(request.sampling.n))
        self.is_started = False
        self.logprobs: Sequence[TokenLogprobs | None] | None = None
        self.num_tokens = 0
        self.num_cached = 0
        self.num_ended = 0


class Generation(AbstractAsyncContextManager["Generation"]):
    """Accepted requests, read to their end as one sequence of `Piece`s.

    All requests have the same `n`. Leaving the context aborts whatever still runs and calls
    `on_exit`. shows_metrics: the reply says how its sequence ran.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        streams: Sequence[RequestStream],
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Clock,
        on_exit: Callable[[Generation], None],
        *,
        shows_metrics: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._record_metrics = metrics
        self._clock = clock
        self._on_exit = on_exit
        self._n = requests[0].sampling.n
        self._prompts = [
            self._prompt(request, stream) for request, stream in zip(requests, streams, strict=True)
        ]
        self._num_unfinished = self.num_choices
        self._failure: RequestError | None = None
        self.usage = Usage(sum(request.num_prompt_tokens for request in requests))
        self._shows_metrics = shows_metrics
        self._metrics: RequestMetrics | None = None

    @property
    def num_choices(self) -> int:
        return len(self._prompts) * self._n

    def summary(self) -> dict[str, object]:
        """The fields of a reply that are known when all has been delivered. `metrics` are of one
        sequence: as in vLLM, there are none for several.
        """
        fields: dict[str, object] = {"usage": self.usage.body()}
        if self._shows_metrics:
            fields["metrics"] = None if self._metrics is None else asdict(self._metrics)
        return fields

    def abort(self) -> None:
        """End what still runs; the final pieces come nevertheless."""
        for prompt in self._prompts:
            prompt.stream.abort()

    async def __aexit__(self, *exception: object) -> None:
        self.abort()
        now = self._clock()
        for prompt in self._prompts:
            prompt.record.lost(FinishReason.ABORT, now)
        self._on_exit(self)

    async def deliver(
        self, take: Callable[[Piece], None], forget: Callable[[int], None] | None = None
    ) -> None:
        """Call `take` with each piece as it comes, until all sequences have ended.

        forget: called with a choice's number when all that came of it will come again, because its
        engine has died and another has begun with it; without it, that is an error. Raises
        RequestError if one fails (the others are then aborted), EngineDeadError if the engine dies,
        and what `take` raises.
        """
        ended = asyncio.get_running_loop().create_future()

        def hear(number: int, item: TokenDelta | EngineDeadError) -> None:
            if ended.done():
                return
            try:
                if isinstance(item, EngineDeadError):
                    raise item
                self._hear(number, item, take)
            except Exception as error:  # noqa: BLE001 - raised where the end is awaited
                ended.set_exception(error)
            else:
                if self._num_unfinished == 0:
                    ended.set_result(None)

        for number, prompt in enumerate(self._prompts):
            again = None if forget is None else partial(self._begin_again, number, forget)
            prompt.stream.listen(partial(hear, number), forget=again)
        try:
            await ended
        except EngineDeadError:
            now = self._clock()
            for prompt in self._prompts:
                prompt.record.lost(FinishReason.ERROR, now)
            raise
        if self._failure is not None:
            raise self._failure

    def _prompt(self, request: Request, stream: RequestStream) -> _Prompt:
        record = RequestRecord(self._record_metrics, request)
        return _Prompt(request, stream, record, self._tokenizer)

    def _begin_again(self, number: int, forget: Callable[[int], None]) -> None:
        """Drop what came of a prompt; in the metrics, that has ended with an error."""
        lost = self._prompts[number]
        lost.record.lost(FinishReason.ERROR, self._clock())
        self.usage.completion_tokens -= lost.num_tokens
        self.usage.cached_tokens -= lost.num_cached
        self._num_unfinished += lost.num_ended
        self._prompts[number] = self._prompt(lost.request, lost.stream)
        for choice in range(number * self._n, (number + 1) * self._n):
            forget(choice)

    def _hear(self, number: int, delta: TokenDelta, take: Callable[[Piece], None]) -> None:
        piece = self._take(number, delta)
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            self._prompts[number].num_ended += 1
            if delta.finish_reason is FinishReason.ERROR and self._failure is None:
                self._failure = _failure(delta)
                self.abort()
        if piece is not None and self._failure is None:
            take(piece)

    def _take(self, number: int, delta: TokenDelta) -> Piece | None:
        """Account for a delta; None if it adds nothing to the reply."""
        prompt = self._prompts[number]
        now = self._clock()
        if not prompt.is_started:
            prompt.is_started = True
            prompt.logprobs = delta.prompt_logprobs
            prompt.num_cached = delta.num_cached_tokens
            self.usage.cached_tokens += delta.num_cached_tokens
        added = prompt.choices[delta.index].take(delta)
        if added is None:  # the engine may have been a step ahead of a stop string
            if delta.finish_reason is not None:
                self._record_end(prompt, delta, FinishReason.STOP, now)
            return None

        if num_tokens := len(added.token_ids):
            prompt.num_tokens += num_tokens
            self.usage.completion_tokens += num_tokens
            prompt.record.delivered(delta.index, num_tokens, delta.num_cached_tokens, now)
        if added.must_stop:
            prompt.stream.stop(delta.index)
        elif added.finish_reason is not None:
            self._record_end(prompt, delta, added.finish_reason, now)
        is_first = delta.index in prompt.unstarted
        prompt.unstarted.discard(delta.index)
        return Piece(
            number * self._n + delta.index,
            added.text,
            added.token_ids,
            added.logprobs,
            prompt.logprobs if is_first else None,
            added.finish_reason,
            added.stop_reason,
        )

    def _record_end(
        self, prompt: _Prompt, delta: TokenDelta, reason: FinishReason, now: float
    ) -> None:
        prompt.record.ended(delta.index, reason, now, delta.times, delta.num_preemptions)
        if self.num_choices == 1 and delta.times is not None:
            num_tokens = self.usage.completion_tokens
            self._metrics = request_metrics(delta.times, num_tokens, delta.drafts)


async def collect(generation: Generation) -> list[Piece]:
    """Each choice of the reply as one piece."""
    pieces: list[list[Piece]] = [[] for _ in range(generation.num_choices)]
    await generation.deliver(
        lambda piece: pieces[piece.choice].append(piece),
        forget=lambda choice: pieces[choice].clear(),
    )
    return [_joined(of_choice) for of_choice in pieces]


def _joined(pieces: Sequence[Piece]) -> Piece:
    first, last = pieces[0], pieces[-1]
    return last._replace(
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=None
        if all(piece.logprobs is None for piece in pieces)
        else [entry for piece in pieces for entry in piece.logprobs or ()],
        prompt_logprobs=first.prompt_logprobs,
    )


def _failure(delta: TokenDelta) -> RequestError:
    """What a client is told of a sequence that ended with an error."""
    message = sanitized(delta.error or "the request failed")
    if delta.is_refusal:
        return RequestError(message)
    return RequestError(f"{SERVER_ERROR} ({message})", status=500)
