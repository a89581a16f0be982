"""A model that says what the test tells it to, behind the real scheduler, engine and server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import httpx
import tokenizers
import uvicorn

from octavo.config import ServerConfig
from octavo.core.clock import monotonic
from octavo.core.errors import RequestError
from octavo.core.step import (
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
    StepOutput,
    TokenLogprobs,
)
from octavo.engine.client import EngineClient
from octavo.engine.inprocess import InProcessEngine
from octavo.engine.loop import EngineLoop
from octavo.engine.restarts import Restarts
from octavo.executor.base import Executor
from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.drafting import FixedDrafts
from octavo.scheduler.policies import policy_named
from octavo.scheduler.scheduler import Scheduler
from octavo.server.app import create_app
from octavo.speculative_config import SpeculativeConfig
from octavo.text.chat_template import ChatTemplate
from octavo.text.pieces import byte_alphabet
from octavo.text.served_model import ServedModel
from octavo.text.tokenizer import Tokenizer
from support.tiny_tokenizers import sentencepiece_pieces, text_assets

Script = Callable[[Sequence[int], int], int]
"""(prompt ids, tokens generated so far) -> the next token."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


# --- text -------------------------------------------------------------------------------------


def byte_tokenizer(words: Sequence[str | bytes] = ()) -> Tokenizer:
    """Byte-level: ids 0 to 255 are the bytes, then `words` (no text encodes to them), SPECIAL."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    pieces = [bytes([byte]) for byte in range(256)]
    spelled = [word.encode() if isinstance(word, str) else word for word in words]
    pieces += [word for word in spelled if len(word) > 1]  # single bytes are there already
    vocab = {"".join(letters[b] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return Tokenizer(tokenizer, named_tokens={"eos_token": "<|im_end|>"})


def ids_of(tokenizer: Tokenizer, *words: str | bytes) -> list[int]:
    """The ids of `words` that the tokenizer was made with; other text byte by byte."""
    found: list[int] = []
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        whole = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == data]
        found += whole[:1] or list(data)
    return found


def byte_model(
    words: Sequence[str | bytes] = (), *, template: str | None = CHATML, **overrides: Any
) -> ServedModel:
    tokenizer = byte_tokenizer(words)
    model = ServedModel(
        names=("scripted", "org/alias"),
        root="scripted",
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, tokenizer),
        max_model_len=4096,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset(tokenizer.eos_ids),
        fingerprint="fp_scripted",
        created=1_700_000_000,
    )
    return replace(model, **overrides)


def sentencepiece_model() -> ServedModel:
    """Served with a SentencePiece tokenizer, which begins prompts with token 1; 2 ends them."""
    pieces = sentencepiece_pieces()
    gguf = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = Tokenizer.from_assets(text_assets(gguf=gguf))
    return byte_model(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset(tokenizer.eos_ids),
        chat_template=ChatTemplate(CHATML, tokenizer),
    )


def always(tokens: Sequence[int]) -> Script:
    """The same tokens for every prompt, over and over."""
    return lambda prompt, count: tokens[count % len(tokens)]


def saying(tokens: Sequence[int], end: int) -> Script:
    """These tokens, then the end of the text."""
    return lambda prompt, count: tokens[count] if count < len(tokens) else end


# --- the executor -----------------------------------------------------------------------------


@dataclass
class _Slot:
    binding: SlotBinding
    generated: int = 0


@dataclass
class ScriptedExecutor(Executor):
    """Computes nothing: each sequence's next token is the script's.

    fault: (prompt ids, tokens generated so far) -> None, the error of that sequence alone (as a
    RequestError it is its request's own doing), or an exception that the step raises. step_seconds,
    prefill_seconds: how long a step takes, and more if it has prompt tokens. is_misguess: (prompt
    ids, tokens generated so far) -> whether a draft has another token than the script there.
    """

    script: Script
    num_blocks: int = 4096
    max_steps_in_flight: int = 1
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    fault: Callable[[Sequence[int], int], str | Exception | None] = lambda prompt, count: None
    is_misguess: Callable[[Sequence[int], int], bool] = lambda prompt, count: False
    bindings: list[SlotBinding] = field(default_factory=list)
    _slots: dict[int, _Slot] = field(default_factory=dict)

    @property
    def last_prompt(self) -> list[int]:
        """What the model was given to read by the latest request."""
        return list(self.bindings[-1].token_ids[: self.bindings[-1].num_prompt_tokens])

    def submit(self, step: ScheduledStep) -> _Answer:
        seconds = self.step_seconds
        for binding in step.bindings:
            self.bindings.append(binding)
            generated = len(binding.token_ids) - binding.num_prompt_tokens
            self._slots[binding.slot] = _Slot(binding, generated)
            seconds += self.prefill_seconds
        if seconds:
            time.sleep(seconds)
        try:
            outputs = [self._output(sequence) for sequence in step.sequences]
        except Exception as error:  # noqa: BLE001 - a scripted fault, raised where real ones are
            return _Answer(error)
        return _Answer(StepOutput(step.step_id, outputs))

    def shutdown(self) -> None:
        self._slots.clear()

    def _output(self, sequence: ScheduledSequence) -> SequenceOutput:
        slot = self._slots[sequence.slot]
        binding = slot.binding
        prompt = binding.token_ids[: binding.num_prompt_tokens]
        fault = self.fault(prompt, slot.generated)
        if isinstance(fault, RequestError):
            return SequenceOutput(sequence.slot, (), error=fault.message, is_refusal=True)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return SequenceOutput(sequence.slot, (), error=fault)
        wanted = binding.sampling.prompt_logprobs
        of_prompt = None
        if wanted is not None:
            ahead = prompt[sequence.start + 1 : sequence.start + sequence.num_tokens + 1]
            of_prompt = tuple(_logprobs(token, wanted) for token in ahead)
        if not sequence.samples:
            return SequenceOutput(sequence.slot, (), prompt_logprobs=of_prompt)
        num_drafts = sequence.draft.length if sequence.draft is not None else 0
        tokens = [self.script(prompt, slot.generated)]
        while len(tokens) <= num_drafts and not self.is_misguess(prompt, slot.generated):
            slot.generated += 1
            tokens.append(self.script(prompt, slot.generated))
        slot.generated += 1
        wanted = binding.sampling.logprobs
        return SequenceOutput(
            sequence.slot,
            tuple(tokens),
            None if wanted is None else tuple(_logprobs(token, wanted) for token in tokens),
            of_prompt,
            num_drafts=num_drafts,
        )


@dataclass
class _Answer:
    value: StepOutput | Exception

    def result(self) -> StepOutput:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The token is the likeliest; those after it in the vocabulary follow."""
    top = tuple(((token + i) % 256 if i else token, -0.5 - i) for i in range(count))
    return TokenLogprobs(token, -0.5, 1, top)


# --- the server -------------------------------------------------------------------------------


def scripted_engine(
    executor: ScriptedExecutor,
    model: ServedModel,
    *,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    max_num_queued_reqs: int | None = None,
    enable_prefix_caching: bool = True,
    draft_length: int = 0,
    restarts: Restarts | None = None,
) -> InProcessEngine:
    scheduler = Scheduler(
        BlockPool(executor.num_blocks, enable_prefix_caching=enable_prefix_caching),
        policy_named("fcfs"),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model.max_model_len,
        max_num_queued_reqs=max_num_queued_reqs,
        drafting=FixedDrafts(draft_length) if draft_length else None,
    )
    loop = EngineLoop(scheduler, executor, monotonic, restarts=restarts)
    return InProcessEngine(lambda: (loop, None))


@dataclass
class ScriptedServer:
    """A running server; `http` and `openai` are clients of it."""

    url: str
    model: ServedModel
    engine: EngineClient
    executor: ScriptedExecutor

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def chat(self, **fields: Any) -> httpx.Response:
        message = {"role": "user", "content": "hi"}
        return self.http.post("/v1/chat/completions", json={"messages": [message], **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hi", **fields})

    def metrics(self) -> Mapping[str, float]:
        """Sample name (with its labels other than model_name and engine) -> value."""
        samples: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            name, value = line.rsplit(" ", 1)
            for label in ('engine="0"', f'model_name="{self.model.name}"'):
                name = name.replace(label, "").replace("{,", "{").replace(",,", ",")
            name = name.replace(",}", "}").replace("{}", "")
            samples[name] = float(value)
        return samples

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until no sequence runs or waits and every KV block is free."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.engine.stats
            if stats.num_running == stats.num_waiting == 0 and stats.kv_usage == 0:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {seconds} s: {stats}")
            time.sleep(0.01)


@contextmanager
def scripted_server(
    executor: ScriptedExecutor,
    model: ServedModel,
    config: ServerConfig | None = None,
    *,
    draft_length: int = 0,
    **scheduling: Any,
) -> Iterator[ScriptedServer]:
    """A real uvicorn on a free port, on a thread. draft_length: of the drafts of each step."""
    config = config or ServerConfig()
    engine = scripted_engine(executor, model, draft_length=draft_length, **scheduling)
    methods = ({"method": "scripted"},) if draft_length else ()
    speculation = SpeculativeConfig(methods, (draft_length,) * len(methods), is_adaptive=False)
    app = create_app(model, engine, config, monotonic, speculation=speculation)
    parts = {"http": "h11", "loop": "asyncio"}  # as the real one has them
    config_of_uvicorn = uvicorn.Config(app, port=0, log_config=None, log_level="error", **parts)
    server = uvicorn.Server(config_of_uvicorn)
    is_ready = threading.Event()
    ports: list[int] = []

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.005)
        ports.append(server.servers[0].sockets[0].getsockname()[1])
        is_ready.set()

    @asynccontextmanager
    async def running_engine() -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.shutdown()

    async def main() -> None:
        async with running_engine():
            announcing = asyncio.create_task(announce())
            await server.serve()
            await announcing

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="scripted-server")
    thread.start()
    try:
        if not is_ready.wait(10):
            raise TimeoutError("the scripted server did not start")
        running = ScriptedServer(f"http://127.0.0.1:{ports[0]}", model, engine, executor)
        with running.http:
            yield running
    finally:
        server.should_exit = True
        thread.join(10)


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    """The message of an error body, whose shape is checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    return str(error["message"])


def post(server: ScriptedServer, path: str, **fields: Any) -> httpx.Response:
    return server.http.post(path, json=fields)
