"""Octavo as a Ray Serve application: a gateway, and replicas that are scaled, watched and replaced.

Each replica is an actor with Octavo's whole HTTP application in it and the engine in a process of
its own, as under `octavo serve`. The gateway exists because Ray's own proxies choose a replica
before anyone has read the request: where a prompt goes depends on how it begins (`ray_router.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from octavo import assembly
from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError
from octavo.deploy.forwarding import Gateway, ReplicaLostError, answer
from octavo.deploy.merged_metrics import merged
from octavo.deploy.ray_config import RayApplication, ServeFile
from octavo.deploy.scaling import replicas_wanted
from octavo.logs import log_to_stderr

if TYPE_CHECKING:
    from starlette.types import Message, Scope

logger = logging.getLogger("octavo.deploy")

_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_TELL_SECONDS = 0.5
"""With a dead engine a replica stays this long, for the last words of its streams to leave."""
_METRICS_TIMEOUT_S = 5.0
_ENGINE, _GATEWAY = "Engine", "Gateway"


def application(args: Mapping[str, Any]) -> serve.Application:
    """What the file's `import_path` names: the application of its `args`. Raises ConfigError."""
    wanted = RayApplication.from_args(args)
    engine = serve.deployment(
        Engine,
        name=_ENGINE,
        ray_actor_options={
            "num_cpus": wanted.cpus_per_replica,
            "num_gpus": wanted.gpus_per_replica,
        },
        max_ongoing_requests=wanted.max_ongoing_requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=wanted.min_replicas,
            max_replicas=wanted.max_replicas,
            target_ongoing_requests=wanted.requests_per_replica,
            policy=AutoscalingPolicy(policy_function=f"{__name__}:scale"),
        ),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=wanted.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class="octavo.deploy.ray_router.PrefixRouter"
        ),
    )
    gateway = serve.deployment(
        serve.ingress()(GatewayReplica),
        name=_GATEWAY,
        # It computes little, and must stand when the node of another one is lost.
        num_replicas=min(2, wanted.max_replicas),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=wanted.drain_seconds,
    )
    bound = engine.bind(dict(args))
    return gateway.bind(bound, wanted.replica_config({}).server.max_body_bytes)


def scale(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray's autoscaling policy: see `replicas_wanted`."""
    usages = (context.aggregated_metrics or {}).get("kv_usage", {})
    wanted = replicas_wanted(
        context.total_num_requests, context.config.get_target_ongoing_requests(), usages.values()
    )
    return wanted, {}


class Engine:
    """A replica: the engine and the HTTP application in front of it."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Ray waits for it."""
        self._ending = AsyncExitStack()
        self._is_ending = False
        config = RayApplication.from_args(args).replica_config(os.environ)
        log_to_stderr(config.server.log_level)
        from octavo.server.app import create_app

        child = await asyncio.to_thread(assembly.engine_child, config)
        checkpoint = await asyncio.to_thread(assembly.open_model, config.model)
        text = await asyncio.to_thread(assembly.load_text, config.model, checkpoint)
        vocab_size = assembly.vocab_size(checkpoint, text)
        await asyncio.to_thread(assembly.check_draft_models, config, text, vocab_size)
        self._engine = assembly.engine_client(config, checkpoint, vocab_size, child=child)
        await self._engine.start()
        self._ending.push_async_callback(self._engine.shutdown)
        self._app = create_app(
            assembly.served_model(config.model, checkpoint, text, self._engine.facts),
            self._engine,
            config.server,
            monotonic,
            cache_info=assembly.cache_info(config.cache, self._engine.facts),
            speculation=config.speculation.parsed,
        )
        await self._ending.enter_async_context(self._app.router.lifespan_context(self._app))
        self._watch = asyncio.create_task(self._end_when_dead())

    async def answer(
        self, scope: Scope, body: bytes, *, prefix: Sequence[bytes]
    ) -> AsyncGenerator[list[Message], None]:
        """prefix: what the router has chosen this replica by."""
        async for messages in answer(self._app, scope, body, lambda: self._is_dead):
            yield messages

    def metrics(self) -> tuple[str, str]:
        """(this replica's name, what it has counted)"""
        name = serve.get_replica_context().replica_tag
        return name, self._app.state.serving.metrics.exposition().decode()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray; `scale` gets it."""
        return {"kv_usage": self._engine.stats.kv_usage}

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica when it raises."""
        if self._is_dead:
            raise RuntimeError(f"the engine is dead: {self._engine.error}")

    async def __del__(self) -> None:
        """Called by Ray when it removes the replica and its requests have ended, or their time."""
        self._is_ending = True
        await self._ending.aclose()

    @property
    def _is_dead(self) -> bool:
        return self._engine.error is not None

    async def _end_when_dead(self) -> None:
        """The actor's end is seen at once, where Ray asks for its health three times first; until
        then the router would prefer it, as the one that is least busy.
        """
        await self._engine.wait_closed()
        if not self._is_ending:
            logger.critical("the engine has died; this replica ends")
            await asyncio.sleep(_TELL_SECONDS)
            os._exit(1)


class GatewayReplica:
    """A gateway, as Ray runs it."""

    def __init__(self, engines: Any, max_body_bytes: int) -> None:
        self._engines = engines
        self._answers = engines.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> Gateway:
        return Gateway(self._ask, self._metrics, max_body_bytes=self._max_body_bytes)

    async def _ask(
        self, scope: Scope, body: bytes, prefix: Sequence[bytes]
    ) -> AsyncGenerator[Sequence[Message], None]:
        stream = self._answers.remote(scope, body, prefix=prefix)
        is_ended = False
        try:
            async for messages in stream:
                yield messages
            is_ended = True
        except RayActorError as error:
            is_ended = True
            raise ReplicaLostError(str(error)) from None
        finally:
            if not is_ended:  # the client has left
                stream.cancel()

    async def _metrics(self) -> bytes:
        told = await self._engines.broadcast("metrics").results_async(
            timeout_s=_METRICS_TIMEOUT_S, return_exceptions=True
        )
        return merged(dict(one for one in told if not isinstance(one, Exception)))


def run(file: ServeFile, *, address: str | None, on_ready: Callable[[str], None]) -> None:
    """Run the application until SIGINT or SIGTERM: on the cluster at `address`, else on the one
    that RAY_ADDRESS names, else on one of this machine alone, made for it.

    on_ready: called with the URL when all is up. Belongs to the main thread.
    """
    own = address is None and not os.environ.get("RAY_ADDRESS")
    if own:
        ray.init(address="local", include_dashboard=False)
    else:
        ray.init(address=address)
    try:
        serve.start(proxy_location=file.proxy_location, http_options=dict(file.http_options))
        app = application(asdict(file.application))
        try:
            serve.run(app, name=file.name, route_prefix=file.route_prefix)
        except RuntimeError:
            raise ConfigError(f"Ray could not start it: {_reason()}") from None
        with _until_signal():  # after Ray's own handlers
            host = file.http_options.get("host", "127.0.0.1")
            on_ready(f"http://{host}:{file.http_options.get('port', 8000)}")
    finally:
        serve.shutdown() if own else serve.delete(file.name)
        ray.shutdown()


@contextmanager
def _until_signal() -> Iterator[None]:
    """At its end, waits for SIGINT or SIGTERM, if none has come yet."""
    came = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: came.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
        came.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason() -> str:
    """Why the application does not run: what its replicas said last."""
    told = [
        deployment.message
        for application in serve.status().applications.values()
        for deployment in application.deployments.values()
        if deployment.message
    ]
    found = re.findall(r"^octavo\.core\.errors\.\w+: (.+)$", "\n".join(told), re.MULTILINE)
    return found[-1] if found else "\n".join(told) or "see Ray's log above"
