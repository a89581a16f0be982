"""What all endpoints share: the model, the engine, and the requests that are open."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence

from octavo.config import ServerConfig
from octavo.core.clock import Clock
from octavo.core.errors import QueueFullError, RequestError
from octavo.core.request import Request
from octavo.engine.client import EngineClient, RequestStream
from octavo.server.generation import Generation
from octavo.server.metrics import Metrics
from octavo.server.prompts import PromptEncoder
from octavo.speculative_config import SpeculativeConfig
from octavo.text.served_model import ServedModel


class Serving:
    """One model behind one engine."""

    def __init__(
        self,
        model: ServedModel,
        engine: EngineClient,
        config: ServerConfig,
        clock: Clock,
        cache_info: Mapping[str, object],
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.config = config
        self.clock = clock
        self.prompts = PromptEncoder(model)
        self.metrics = Metrics(
            config.metrics_prefix, model.name, model.max_model_len, cache_info, speculation
        )
        engine.on_stats = self.metrics.on_stats
        self.metrics.on_stats(engine.stats)  # as it is before its first step
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
            shows_metrics=self.config.enable_per_request_metrics,
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
        answers = [asyncio.ensure_future(self.engine.submit(request)) for request in requests]
        try:
            return await asyncio.gather(*answers)
        except BaseException:  # a refusal, or this HTTP request was cancelled
            for answer in answers:
                # Where the engine has not answered yet, cancelling aborts.
                if not answer.cancel() and not answer.cancelled() and answer.exception() is None:
                    answer.result().abort()
            raise


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
