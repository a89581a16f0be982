"""What /metrics and `usage` count."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from octavo.config import ServerConfig
from support.scripted import (
    ScriptedExecutor,
    ScriptedServer,
    always,
    byte_model,
    scripted_server,
    sentencepiece_model,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    executor = ScriptedExecutor(always([97]), step_seconds=0.002)
    with scripted_server(executor, byte_model()) as running:
        yield running


def test_met_01_latencies_are_measured(server: ScriptedServer) -> None:
    before = server.metrics()
    begin = time.monotonic()
    for _ in range(5):
        assert server.complete(max_tokens=20).status_code == 200
    elapsed = time.monotonic() - begin
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["octavo:time_to_first_token_seconds_count"] == 5
    assert grown["octavo:inter_token_latency_seconds_count"] == 5 * 19
    assert 0.002 * 5 <= grown["octavo:time_to_first_token_seconds_sum"] < elapsed
    per_token = grown["octavo:request_time_per_output_token_seconds_sum"] / 5
    assert 0.002 <= per_token < elapsed / 5 / 19
    # Seconds, as the client's own clock has them; none of them is 0.
    for name, least in (
        ("inter_token_latency", 0.002 * 5 * 19),
        ("e2e_request_latency", 0.002 * 5 * 20),
        ("request_inference_time", 0.002 * 5 * 20),
        ("request_prefill_time", 0.002 * 5),
        ("request_decode_time", 0.002 * 5 * 19),
    ):
        assert least <= grown[f"octavo:{name}_seconds_sum"] <= elapsed, name
    histograms = {name.partition("_bucket{")[0] for name in after if "_bucket{le=" in name}
    assert {f"octavo:{name}_seconds" for name in ("time_to_first_token", "inter_token_latency")} < (
        histograms
    )
    for histogram in histograms:
        buckets = [n for name, n in after.items() if name.startswith(f"{histogram}_bucket{{le=")]
        assert buckets == sorted(buckets), "cumulative"
        endless = after[f'{histogram}_bucket{{le="+Inf"}}']
        assert endless == buckets[-1] == after[f"{histogram}_count"]


def test_counters_explain_the_throughput(server: ScriptedServer) -> None:
    for _ in range(2):
        assert server.complete(max_tokens=10, n=4).status_code == 200
    server.wait_idle()
    found = server.metrics()
    steps = found["octavo:engine_steps_total"]
    assert steps == found["octavo:iteration_tokens_total_count"] == 2 * 11
    # Three siblings start when the first of the four has computed the prompt.
    assert found["octavo:sampled_sequences_total"] == found["octavo:generation_tokens_total"] == 80
    assert found["octavo:scheduled_sequences_total"] == found["octavo:taken_slots_total"] == 80
    assert 0 < found["octavo:kv_tokens_total"] < found["octavo:kv_capacity_tokens_total"]
    assert found["octavo:kv_cache_blocks"] == 0


def test_met_03_totals_agree(server: ScriptedServer) -> None:
    for _ in range(3):
        body = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 4000}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    assert server.complete(max_tokens=5).status_code == 200
    assert server.complete(stop="aaa").status_code == 200
    assert server.complete(top_p=5).status_code == 400
    server.wait_idle()
    time.sleep(0.05)  # the last deltas reach the event loop
    found = server.metrics()
    for reason, count in {"abort": 3, "length": 1, "stop": 1, "error": 0}.items():
        assert found[f'octavo:request_success_total{{finished_reason="{reason}"}}'] == count
    assert found["octavo:num_requests_running"] == found["octavo:num_requests_waiting"] == 0
    assert found["octavo:prompt_tokens_total"] == found["octavo:request_prompt_tokens_sum"] == 7
    assert (
        found["octavo:generation_tokens_total"] == (found["octavo:request_generation_tokens_sum"])
    )
    for name in ("request_generation_tokens", "e2e_request_latency_seconds", "request_params_n"):
        assert found[f"octavo:{name}_count"] == 5


@pytest.fixture(params=[byte_model, sentencepiece_model], ids=["no bos", "bos"])
def either_server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    with scripted_server(ScriptedExecutor(always([97])), request.param()) as running:
        yield running


def test_met_06_prompt_tokens(either_server: ScriptedServer) -> None:
    server = either_server
    turn = {"role": "user", "content": "hi"}
    for path, fields in (
        ("completions", {"prompt": [1]}),
        ("completions", {"prompt": list(range(1, 8))}),
        ("completions", {"prompt": list(range(1, 34))}),
        ("completions", {"prompt": "some text é"}),
        ("chat/completions", {"messages": [turn]}),
        ("chat/completions", {"messages": [turn] * 5}),
    ):
        body = {**fields, "max_tokens": 3}
        usage = server.http.post(f"/v1/{path}", json=body).json()["usage"]
        fed = server.executor.last_prompt
        assert usage["prompt_tokens"] == len(fed)
        if "messages" in fields:
            text = b"".join(map(server.model.tokenizer.token_bytes, fed))
            assert text.endswith(b"assistant\n"), "the template is counted"
        elif fields["prompt"] == "some text é":
            assert (fed[0] == 1) == (server.model.tokenizer.bos_id == 1), "what begins it, too"
        else:
            assert fed == fields["prompt"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + 3
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = server.http.post(f"/v1/{path}", json={**body, **options}).text
        assert f'"prompt_tokens":{usage["prompt_tokens"]},' in stream
        assert f'"total_tokens":{usage["total_tokens"]},' in stream


def test_pfx_10_cached_tokens_are_summed_over_prompts(server: ScriptedServer) -> None:
    first, second = list(range(1, 49)), list(range(100, 180))
    for prompt in (first, second):
        server.complete(prompt=prompt, max_tokens=1)
    for prompts in ([first, second], [second, first]):
        usage = server.complete(prompt=prompts, max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 32 + 64
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (128, 130)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = server.complete(prompt=prompts, max_tokens=1, **options).text
        assert '"cached_tokens":96' in stream


def test_http_requests_are_counted_by_route(server: ScriptedServer) -> None:
    assert server.complete(max_tokens=1).status_code == 200
    assert server.complete(max_tokens=2, stream=True).status_code == 200
    assert server.complete(top_p=5).status_code == 400
    assert server.http.get("/v1/completions").status_code == 405
    for path in ("/nothing", "/v1/nowhere", "/nothing/else"):
        assert server.http.request("FROB", path).status_code == 404
    assert server.http.get("/v1/models/org/alias").status_code == 200
    found = server.metrics()
    counts = {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/completions", "GET", "4xx"): 1,
        ("none", "none", "4xx"): 3,
        ("/v1/models/{model_id:path}", "GET", "2xx"): 1,
    }
    for (handler, method, status), count in counts.items():
        labels = f'handler="{handler}",method="{method}",status="{status}"'
        assert found[f"http_requests_total{{{labels}}}"] == count
    labels = 'handler="/v1/completions",method="POST"'
    assert found[f"http_request_duration_seconds_count{{{labels}}}"] == 3
    assert found[f"http_request_duration_seconds_sum{{{labels}}}"] >= 0.002 * 3


def test_a_request_that_ends_in_an_exception_is_counted(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(request: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(server.engine, "submit", broken)
    url = f"{server.url}/v1/completions"  # whose connection uvicorn closes after such an error
    assert httpx.post(url, json={"prompt": "x"}).status_code == 500
    labels = 'handler="/v1/completions",method="POST",status="5xx"'
    assert server.metrics()[f"http_requests_total{{{labels}}}"] == 1


def test_prefix_of_the_names() -> None:
    config = ServerConfig(metrics_prefix="vllm")
    with scripted_server(ScriptedExecutor(always([97])), byte_model(), config) as server:
        response = server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert "vllm:num_requests_running" in response.text
        assert "octavo" not in response.text
