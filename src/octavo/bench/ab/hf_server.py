"""The baselines hf-naive and hf-static: transformers' `generate` behind the OpenAI API.

    python -m octavo.bench.ab.hf_server --batching naive|static --port PORT

naive computes one request after another. static computes batches of those that wait, and starts the
next batch when the longest of one has ended. Both stream, so that a client measures them as it
measures any server; what that costs is counted, and shown in /metrics as the shim's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from octavo.bench.ab.hf_models import VALUE_BYTES, BatchCounts, HuggingFaceModel, NewToken, Row
from octavo.bench.ab.hf_requests import json_object, read_request
from octavo.core.errors import ConfigError, OctavoError, RequestError
from octavo.core.request import FinishReason
from octavo.knob import parse_number
from octavo.logs import log_to_stderr
from octavo.text.output import OutputText

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE = 16
_GATHER_SECONDS = 0.05
"""A batch waits so long for others: requests that are sent at once come one after another."""


class Batcher:
    """Takes requests in the order of their arrival, up to `batch_size` at a time."""

    def __init__(self, model: HuggingFaceModel, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._waiting: asyncio.Queue[Row] = asyncio.Queue()
        self._running: list[Row] = []
        self._begin_seconds = 0.0
        self.counts = BatchCounts()

    @property
    def num_waiting(self) -> int:
        return self._waiting.qsize()

    @property
    def num_running(self) -> int:
        return sum(not row.is_done for row in self._running)

    @property
    def shim_seconds(self) -> float:
        """What is not transformers: handing tokens over, and this event loop's processor time. To
        be asked on the event loop's thread.
        """
        return self.counts.handing_out_seconds + time.thread_time() - self._begin_seconds

    def add(self, row: Row) -> None:
        self._waiting.put_nowait(row)

    async def run(self) -> None:
        """Until it is cancelled; a batch that runs then ends with its next step."""
        loop = asyncio.get_running_loop()
        self._begin_seconds = time.thread_time()

        def on_tokens(new: list[NewToken]) -> None:
            loop.call_soon_threadsafe(_deliver, new)

        try:
            while True:
                self._running = await self._next_batch()
                try:
                    await asyncio.to_thread(
                        self._model.generate, self._running, on_tokens, self.counts
                    )
                except RuntimeError:  # torch's, for want of memory as for all else
                    logger.exception("a batch of %d failed", len(self._running))
                    failed = [row for row in self._running if not row.is_done]
                    _deliver([NewToken(row, 0, FinishReason.ERROR) for row in failed])
                self._running = []
        finally:
            for row in self._running:
                row.is_done = True

    async def _next_batch(self) -> list[Row]:
        rows: list[Row] = []
        while not rows:
            rows = [await self._waiting.get()]
            if self._batch_size > 1 and self.num_waiting < self._batch_size - 1:
                await asyncio.sleep(_GATHER_SECONDS)
            while len(rows) < self._batch_size and not self._waiting.empty():
                rows.append(self._waiting.get_nowait())
            rows = [row for row in rows if not row.is_done]  # some clients have left
        return rows


def _deliver(new: list[NewToken]) -> None:
    for token in new:
        token.row.on_token(token)


def create_app(model: HuggingFaceModel, name: str, batch_size: int) -> Starlette:
    """The application. name: of the baseline, told as `owned_by`."""
    batcher = Batcher(model, batch_size)
    numbers = itertools.count()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def completions(request: Request) -> Response:
        fields = read_request(await request.body(), model)
        tokens: asyncio.Queue[NewToken] = asyncio.Queue()
        row = Row(
            prompt=fields["prompt"],
            max_tokens=fields["max_tokens"],
            min_tokens=fields["min_tokens"],
            ignores_eos=fields["ignore_eos"],
            on_token=tokens.put_nowait,
        )
        envelope = {
            "id": f"cmpl-{next(numbers)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        pieces = _pieces(batcher, row, tokens, OutputText(model.tokenizer, row.prompt))
        if fields["stream"]:
            events = _events(pieces, row, envelope, fields["stream_options"])
            return StreamingResponse(events, media_type="text/event-stream")
        whole = [piece async for piece in pieces]
        if (reason := whole[-1][1]) is FinishReason.ERROR:
            raise RequestError("the batch failed; see the server's log", status=500)
        text = "".join(text for text, _ in whole)
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return JSONResponse({**envelope, "choices": [choice], "usage": _usage(row)})

    async def models(request: Request) -> Response:
        card = {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": name,
            "max_model_len": model.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(request: Request) -> Response:
        body = json_object(await request.body())
        if not isinstance(body.get("prompt"), str):
            raise RequestError("prompt must be a text", param="prompt")
        token_ids = model.tokenizer.encode(body["prompt"])
        limit = model.max_model_len
        reply = {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids}
        return JSONResponse(reply)

    async def health(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(_exposition(batcher))

    def refuse(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestError):
            raise error
        body = {
            "message": error.message,
            "type": "BadRequestError" if error.status == 400 else "InternalServerError",
            "param": error.param,
            "code": error.status,
        }
        return JSONResponse({"error": body}, status_code=error.status)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={RequestError: refuse},
        lifespan=lifespan,
    )


async def _pieces(
    batcher: Batcher, row: Row, tokens: asyncio.Queue[NewToken], output: OutputText
) -> AsyncIterator[tuple[str, FinishReason | None]]:
    """Text and, with the last, why it ended. Who stops listening lets the row end."""
    batcher.add(row)
    try:
        reason = None
        while reason is None:
            token = await tokens.get()
            reason = token.finish_reason
            ids = () if reason is FinishReason.ERROR else (token.token_id,)
            delta = output.push(
                ids, final=reason is not None, ended_by_token=reason is FinishReason.STOP
            )
            yield delta.text, reason
    finally:
        row.is_done = True


async def _events(
    pieces: AsyncIterator[tuple[str, FinishReason | None]],
    row: Row,
    envelope: Mapping[str, Any],
    options: Mapping[str, Any],
) -> AsyncIterator[str]:
    async for text, reason in pieces:
        if reason is FinishReason.ERROR:
            yield _event({"error": {"message": "the batch failed", "code": 500}})
        elif text or reason is not None:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
            yield _event({**envelope, "choices": [choice]})
    if options.get("include_usage"):
        yield _event({**envelope, "choices": [], "usage": _usage(row)})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(row: Row) -> dict[str, int]:
    return {
        "prompt_tokens": len(row.prompt),
        "completion_tokens": row.num_tokens,
        "total_tokens": len(row.prompt) + row.num_tokens,
    }


def _exposition(batcher: Batcher) -> str:
    """Prometheus' text."""
    values = asdict(batcher.counts) | {"shim_seconds": batcher.shim_seconds}
    lines = [
        f"# TYPE octavo:{name}_total counter\noctavo:{name}_total {n}" for name, n in values.items()
    ]
    gauges = {
        "num_requests_running": batcher.num_running,
        "num_requests_waiting": batcher.num_waiting,
    }
    lines += [f"# TYPE octavo:{name} gauge\noctavo:{name} {n}" for name, n in gauges.items()]
    return "\n".join(lines) + "\n"


def batch_size(model: HuggingFaceModel, options: argparse.Namespace) -> tuple[int, str]:
    """Requests of a batch, with the reason. With a budget of KV memory it is what fits if each has
    the longest prompt and output: a static batch reserves that.
    """
    if options.batching == "naive":
        return 1, "one request after another"
    if options.kv_cache_memory_bytes is None:
        return options.batch_size or DEFAULT_BATCH_SIZE, (
            "set by --batch-size" if options.batch_size else "the default"
        )
    if options.batch_size is not None:
        raise ConfigError(
            "--batch-size and --kv-cache-memory-bytes both say how large a batch is; omit one"
        )
    length = options.max_model_len or model.max_model_len
    reserved = length * model.kv_bytes_per_token
    count = int(options.kv_cache_memory_bytes // reserved)
    if count < 1:
        raise ConfigError(
            f"--kv-cache-memory-bytes {options.kv_cache_memory_bytes:.0f} is less than the "
            f"{reserved} bytes that one request of {length} tokens reserves; give more, or lower "
            "--max-model-len"
        )
    return count, f"{length} tokens reserved for each take {reserved / 2**20:.1f} MiB"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hf_server", description=__doc__, allow_abbrev=False, add_help=True
    )
    parser.add_argument("--batching", choices=("naive", "static"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="default", help="as for octavo serve")
    parser.add_argument("--dtype", choices=tuple(VALUE_BYTES), default="float32")
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--batch-size", type=int, help=f"of static (default: {DEFAULT_BATCH_SIZE})")
    parser.add_argument("--kv-cache-memory-bytes", type=parse_number, help="decides batches, too")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus output")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(sys.argv[1:] if arguments is None else arguments)
    log_to_stderr("info")
    try:
        model = HuggingFaceModel(options.model, dtype=options.dtype, threads=options.threads)
        size, reason = batch_size(model, options)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = f"hf-{options.batching}"
    print(f"{name}: {model.name} in {options.dtype}, batches of {size} ({reason})")
    app = create_app(model, name, size)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
