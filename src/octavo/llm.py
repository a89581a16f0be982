"""The offline API: a model in this process, for scripts and notebooks. Names follow vLLM's."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo import assembly
from octavo.config import Config, knobs
from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError, OctavoError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.request_metrics import (
    RequestMetrics,
    SpecDecodeMetrics,
    request_metrics,
    spec_decode_metrics,
)
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import EngineStats, RequestTimes, TokenDelta, TokenLogprobs
from octavo.engine.offline import BegunAgain, Heard, LoopEngine, OfflineEngine
from octavo.text.choice import Choice, ChoicePiece
from octavo.text.served_model import ServedModel
from octavo.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
Message = Mapping[str, Any]
_Source = tuple[str | None, list[int]]  # a prompt's text, if it was one, and its token ids


@dataclass(frozen=True)
class Logprob:
    """rank: 1 is the likeliest token. decoded_token: its text when decoded alone."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One continuation. stop_reason: the stop string or stop token id that ended it. error: why it
    failed, if finish_reason is "error"; the others of its batch are not concerned.
    spec_decode_metrics: what became of guessed tokens, if there were any.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_preemptions: int = 0
    spec_decode_metrics: SpecDecodeMetrics | None = None


@dataclass
class RequestOutput:
    """A prompt and its continuations. prompt: None if token ids were given. times, metrics: of the
    first continuation.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    times: RequestTimes | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True)
class TextPiece:
    """What one step added to a streamed text; the last piece has a finish_reason."""

    text: str
    num_tokens: int
    finish_reason: str | None = None


class LLM:
    """A loaded model.

    `model` and the keyword arguments are the knobs of `octavo serve` (see its --help), with
    underscores: `LLM("default", max_model_len=2048, enable_prefix_caching=False)`. Raises
    ConfigError.
    """

    def __init__(self, model: str = "default", **settings: Any) -> None:
        for knob in knobs():
            if knob.section == "server" and knob.name in settings:
                raise ConfigError(f"{knob.name} is a setting of `octavo serve` and not of LLM")
        config = Config.from_flat({"model": model, **settings})
        checkpoint = assembly.open_model(config.model)
        text = assembly.load_text(config.model, checkpoint)
        vocab_size = assembly.vocab_size(checkpoint, text)
        assembly.check_draft_models(config, text, vocab_size)
        self._engine: OfflineEngine
        if config.parallel.data_parallel_size > 1:
            from octavo.replication import offline_engine  # only who has several loads it

            self._engine, self.facts = offline_engine(config, checkpoint, vocab_size)
        else:
            loop, self.facts = assembly.build_engine(config, vocab_size, checkpoint=checkpoint)
            self._engine = LoopEngine(loop)
        self._model = assembly.served_model(config.model, checkpoint, text, self.facts)
        self._ids = map(str, itertools.count())
        self._jobs: dict[str, _Job] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continue each prompt; results are in the prompts' order.

        sampling_params: one for all, or one per prompt (default: the model's own defaults).
        use_tqdm: show a progress bar on a terminal. Raises RequestError, before anything runs, if a
        prompt or parameter can't be served.
        """
        sources = [self._read(prompt) for prompt in _listed(prompts)]
        return self._run(sources, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        What the chat template gets: `tools`, `documents` and further variables of its own in
        `chat_template_kwargs`. continue_final_message: go on with the last message, which the
        assistant has begun, instead of answering it (needs add_generation_prompt=False).
        """
        conversations: list[Any] = [messages]
        if messages and not isinstance(messages[0], Mapping):
            conversations = list(messages)
        sources: list[_Source] = [
            (
                None,
                self._model.chat_template.encode_chat(
                    conversation,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    extra=chat_template_kwargs or {},
                ),
            )
            for conversation in conversations
        ]
        return self._run(sources, sampling_params, use_tqdm, priority)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
    ) -> Iterator[TextPiece]:
        """Continue one prompt, or answer one conversation, piece by piece (n = 1)."""
        params = sampling_params or self.get_default_sampling_params()
        if params.n != 1:
            raise RequestError(f"n must be 1 for a stream, got {params.n}", param="n")
        if messages is not None:
            source: _Source = (None, self._model.chat_template.encode_chat(messages))
        elif prompt is not None:
            source = self._read(prompt)
        else:
            raise RequestError("give a prompt or messages")
        job = self._job(source, params, priority=0)
        try:
            self._add([job], may_begin_again=False)
            while not job.output.finished:
                self._step()
                yield from job.take_pieces()
            yield from job.take_pieces()  # what came in another call's steps
            if (error := job.output.outputs[0].error) is not None:
                raise OctavoError(error)
        finally:
            self._remove([job])  # the caller may have stopped reading

    @property
    def model_name(self) -> str:
        """By which a server would serve it."""
        return self._model.name

    @property
    def vocab_size(self) -> int:
        """A prompt's token ids are below it."""
        return self._model.vocab_size

    def get_tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that asks for nothing, the model's own defaults included."""
        return SamplingParams(**self._model.default_sampling)

    def get_metrics(self) -> EngineStats:
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        self._engine.forget_prefixes()

    def shutdown(self) -> None:
        """Free the model's memory. The object can't be used afterwards."""
        self._engine.close()

    def __repr__(self) -> str:
        return f"LLM({self._model.root!r})"

    def _run(
        self,
        sources: list[_Source],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: int,
    ) -> list[RequestOutput]:
        each = _params_for_each(params or self.get_default_sampling_params(), len(sources))
        jobs = [self._job(s, p, priority) for s, p in zip(sources, each, strict=True)]
        try:
            self._add(jobs, may_begin_again=True)
            with _progress_bar(len(jobs), show_progress) as show:
                while (num_left := sum(not job.output.finished for job in jobs)) > 0:
                    self._step()
                    show(len(jobs) - num_left)
        finally:
            self._remove(jobs)
        return [job.output for job in jobs]

    def _step(self) -> None:
        """One step of the engine, for all jobs: a stream that is open may share it with a batch."""
        for item in self._engine.step():
            self._hear(item)

    def _hear(self, item: Heard) -> None:
        job = self._jobs.get(item.request_id)
        if job is None:
            return
        if isinstance(item, BegunAgain):
            job.begin_again()
        elif job.take(item):
            for more in self._engine.end(item.request_id, item.index, FinishReason.STOP):
                self._hear(more)

    def _add(self, jobs: list[_Job], *, may_begin_again: bool) -> None:
        self._jobs.update((job.request.request_id, job) for job in jobs)
        self._engine.add([job.request for job in jobs], may_begin_again=may_begin_again)

    def _remove(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self._jobs.pop(job.request.request_id, None)
            self._engine.end(job.request.request_id, None, FinishReason.ABORT)

    def _job(self, source: _Source, params: SamplingParams, priority: int) -> _Job:
        prompt, ids = source
        request = self._model.request(
            next(self._ids), ids, params, priority=priority, arrival_time=monotonic()
        )
        return _Job(self._model, request, prompt)

    def _read(self, prompt: Prompt) -> _Source:
        if isinstance(prompt, Mapping):
            for key in ("prompt", "prompt_token_ids"):
                if key in prompt:
                    return self._read(prompt[key])
            raise RequestError(
                f"a prompt given as a dict needs 'prompt' or 'prompt_token_ids', got {list(prompt)}"
            )
        if isinstance(prompt, str):
            return prompt, self._model.tokenizer.encode(prompt)
        return None, list(prompt)


class _Job:
    """A request on its way, and what has come of it."""

    def __init__(self, model: ServedModel, request: Request, prompt: str | None) -> None:
        self.request = request
        self._prompt = prompt
        self._tokenizer = model.tokenizer
        self._pieces: list[TextPiece] = []
        self.begin_again()

    def begin_again(self) -> None:
        """Nothing that came until now counts."""
        request = self.request
        self.output = RequestOutput(
            request.request_id,
            self._prompt,
            list(request.prompt_token_ids),
            [CompletionOutput(i) for i in range(request.sampling.n)],
        )
        self._choices = [Choice(self._tokenizer, request) for _ in self.output.outputs]
        self._pieces.clear()

    def take_pieces(self) -> list[TextPiece]:
        """What came since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, delta: TokenDelta) -> bool:
        """Add a delta. Whether the engine must stop the sequence: a stop string ended its text."""
        piece = self._choices[delta.index].take(delta)
        if piece is not None:
            self._add(delta, piece)
        if delta.times is not None:
            self._add_account(delta, delta.times)
        return piece is not None and piece.must_stop

    def _add(self, delta: TokenDelta, piece: ChoicePiece) -> None:
        output = self.output.outputs[delta.index]
        output.text += piece.text
        output.token_ids += piece.token_ids
        self._add_logprobs(output, piece.logprobs)
        if piece.finish_reason is not None:
            output.finish_reason = piece.finish_reason.value
            output.stop_reason = piece.stop_reason
            output.error = delta.error
        if delta.index == 0:
            self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if entry is None else self._logprobs(entry) for entry in delta.prompt_logprobs
            ]
        self.output.finished = all(choice.is_finished for choice in self._choices)
        self._pieces.append(TextPiece(piece.text, len(piece.token_ids), output.finish_reason))

    def _add_account(self, delta: TokenDelta, times: RequestTimes) -> None:
        """What the engine says of a sequence at its end."""
        output = self.output.outputs[delta.index]
        output.num_preemptions = delta.num_preemptions
        output.spec_decode_metrics = spec_decode_metrics(delta.drafts)
        if delta.index == 0:
            self.output.times = times
            self.output.metrics = request_metrics(times, len(output.token_ids), delta.drafts)

    def _add_logprobs(
        self, output: CompletionOutput, entries: Sequence[TokenLogprobs] | None
    ) -> None:
        if entries is None:
            return
        output.logprobs = (output.logprobs or []) + [self._logprobs(entry) for entry in entries]
        total = sum(entry.logprob for entry in entries)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + total

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The likeliest tokens of a position and the one at hand, by token id."""
        found = {
            token: Logprob(logprob, rank, self._tokenizer.token_text(token))
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        }
        text = self._tokenizer.token_text(entry.token_id)
        found.setdefault(entry.token_id, Logprob(entry.logprob, entry.rank, text))
        return found


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one; a list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling_params for {count} prompts; give one, or as many"
        )
    return list(params)


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts finished requests, if that is a terminal."""
    if not (wanted and total > 1 and sys.stderr.isatty()):
        yield lambda num_done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Requests", total=total)
        yield lambda num_done: progress.update(task, completed=num_done)
