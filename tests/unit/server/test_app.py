"""Which path leads where."""

from __future__ import annotations

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
