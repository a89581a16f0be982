"""Which path leads where."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.core.errors import EngineDeadError
from octavo.core.step import ScheduledStep
from octavo.engine.restarts import Restarts
from octavo.executor.base import PendingStep
from support.scripted import ScriptedExecutor, always, byte_model, post, refused, scripted_server


def test_paths_come_with_a_proxys_prefix_or_without_it() -> None:
    executor = ScriptedExecutor(always([97]))
    with scripted_server(executor, byte_model(), ServerConfig(root_path="/llm")) as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/health").status_code == 200
            reply = post(server, f"{prefix}/v1/completions", prompt="x", max_tokens=1)
            assert reply.status_code == 200
        refused(server.http.get("/other/health"), None, 404)
        counted = server.http.get("/metrics").text
    assert 'http_requests_total{handler="/health",method="GET",status="2xx"} 2.0' in counted


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_head_tells_what_get_would(path: str) -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_limits_change_where_that_was_asked_for() -> None:
    config = ServerConfig(enable_live_limits=True, api_key=["secret"])
    key = {"Authorization": "Bearer secret"}
    with scripted_server(ScriptedExecutor(always([97])), byte_model(), config) as server:

        def limits(**body: object) -> httpx.Response:
            return server.http.post("/limits", json=body, headers=key)

        first = limits().json()
        assert first.keys() == {"max_num_seqs", "max_num_batched_tokens"}
        assert limits(max_num_seqs=2).json() == {**first, "max_num_seqs": 2}
        assert limits().json() == first
        refused(limits(max_num_seqs=1000), "max_num_seqs", 400)
        more = first["max_num_batched_tokens"] + 1
        refused(limits(max_num_batched_tokens=more), "max_num_batched_tokens", 400)
        refused(limits(max_num_seqs=0), "max_num_seqs", 400)
        refused(limits(max_seqs=1), "max_seqs", 400)
        assert server.http.post("/limits", json={}).status_code == 401


def test_limits_do_not_change_otherwise() -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        assert server.http.post("/limits", json={}).status_code == 404


class _MortalExecutor(ScriptedExecutor):
    """Dies of its second step, and comes back when it may."""

    can_restart = True

    def __init__(self) -> None:
        super().__init__(always([97]))
        self.may_come_back = threading.Event()

    def submit(self, step: ScheduledStep) -> PendingStep:
        if step.step_id == 2:
            raise EngineDeadError("worker 1 was killed (signal 9)")
        return super().submit(step)

    def restart(self) -> None:
        self.may_come_back.wait(10)


def test_health_is_bad_while_what_computes_starts_again() -> None:
    executor = _MortalExecutor()
    with (
        scripted_server(executor, byte_model(), restarts=Restarts()) as server,
        ThreadPoolExecutor() as clients,
    ):
        assert server.http.get("/health").status_code == 200
        reply = clients.submit(post, server, "/v1/completions", prompt="x", max_tokens=3)
        while not server.engine.is_restarting:
            time.sleep(0.001)
        message = refused(server.http.get("/health"), None, 503)
        assert message.startswith("a process of the engine has died and another starts")
        late = clients.submit(post, server, "/v1/completions", prompt="y", max_tokens=2)
        executor.may_come_back.set()
        assert reply.result(10).json()["choices"][0]["text"] == "aaa"
        assert late.result(10).json()["choices"][0]["text"] == "aa"
        assert server.http.get("/health").status_code == 200
        assert server.metrics()["octavo:engine_restarts_total"] == 1


def test_health_is_bad_when_the_engine_is_dead() -> None:
    with scripted_server(_MortalExecutor(), byte_model()) as server:
        reply = post(server, "/v1/completions", prompt="x", max_tokens=3)
        assert "worker 1 was killed (signal 9)" in refused(reply, None, 500)
        while server.engine.error is None:
            time.sleep(0.001)
        message = refused(server.http.get("/health"), None, 503)
        assert message == "the engine is dead; restart the server"
