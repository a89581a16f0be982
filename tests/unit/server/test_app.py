"""Which path leads where."""

from __future__ import annotations

import httpx
import pytest

from octavo.config import ServerConfig
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
