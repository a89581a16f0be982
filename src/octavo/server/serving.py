"""What all endpoints share: the model, the engine, and the requests that are open."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from octavo.config import ServerConfig
from octavo.core.clock import Clock
from octavo.core.errors import QueueFullError, RequestError
from octavo.core.request import Request
from octavo.engine.client import EngineClient, RequestStream
from octavo.server.generation import Generation
from octavo.server.metrics import Metrics
from octavo.server.prompts import PromptEncoder
from octavo.server.request_body import Body, Schema
from octavo.text.served_model import ServedModel

Result = TypeVar("Result")


class Serving:
    """One model behind one engine."""

    def __init__(
        self, model: ServedModel, engine: EngineClient, config: ServerConfig, clock: Clock
    ) -> None:
        self.model = model
        self.engine = engine
        self.config = config
        self.clock = clock
        self.prompts = PromptEncoder(model)
        self.metrics = Metrics(config.metrics_prefix, model.name, model.max_model_len)
        engine.on_stats = self.metrics.on_stats
        self._open: set[Generation] = set()
        self._is_closing = False

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises RequestError for a model that isn't served here."""
        if name is None:
            return self.model.name
        if name not in self.model.names:
            aliases = ", ".join(self.model.names)
            raise RequestError(
                f"The model `{name[:200]}` does not exist. Valid aliases: {aliases}",
                param="model",
                status=404,
            )
        return name

    async def prepare(self, body: Body[Schema], work: Callable[[], Result]) -> Result:
        """Do the text work of a request, beside the event loop if it may take long."""
        return await asyncio.to_thread(work) if body.is_large else work()

    async def start(self, requests: Sequence[Request]) -> Generation:
        """Hand the requests of one HTTP request over and wait until all are accepted.

        Raises RequestError or EngineDeadError if one is refused; the others are then aborted.
        """
        if self._is_closing:
            raise RequestError("the server is shutting down; try another one", status=503)
        try:
            streams = await self._submit(requests)
        except QueueFullError:
            self.metrics.queue_full.inc()
            raise
        generation = Generation(
            requests,
            streams,
            self.model.tokenizer,
            self.metrics,
            self.clock,
            on_exit=self._open.discard,
        )
        self._open.add(generation)
        return generation

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._is_closing = True

    def abort_all(self) -> None:
        """End what still runs; the replies say so with finish_reason `abort`."""
        for generation in self._open:
            generation.abort()

    async def _submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        if len(requests) == 1:
            return [await self.engine.submit(requests[0])]
        # At once: each answer may take an engine step.
        results = await asyncio.gather(
            *[self.engine.submit(request) for request in requests], return_exceptions=True
        )
        streams = [result for result in results if isinstance(result, RequestStream)]
        for result in results:
            if isinstance(result, BaseException):
                for stream in streams:
                    stream.abort()
                raise result
        return streams


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
