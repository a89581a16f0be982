from __future__ import annotations

import asyncio

import pytest

from octavo.bench.load.counters import Scrape, parse, scrape
from octavo.bench.load.http1 import Connections
from octavo.bench.load.target import Target
from octavo.core.step import DraftTotals, EngineStats
from octavo.server.metrics import Metrics
from octavo.speculative_config import SpeculativeConfig
from support.mock_server import MockServer, Reply, answer

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m {with} \\"braces\\" 7"} 1e+06
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 10.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 70.0
vllm:cache_config_info{block_size="16"} 1.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 5234.0
"""


def test_series_are_added_up_and_shares_averaged() -> None:
    assert parse(VLLM) == Scrape(
        values={
            "num_requests_running": 7.0,
            "kv_cache_usage_perc": 0.5,
            "generation_tokens_total": 1e6,
            "iteration_tokens_total_count": 10.0,
            "iteration_tokens_total_sum": 70.0,
        },
        gauges={"num_requests_running": 7.0, "kv_cache_usage_perc": 0.5},
    )


def test_positions_are_told_apart_and_added_up() -> None:
    methods = ({"method": "ngram"},)
    metrics = Metrics("vllm", "m", 100, speculation=SpeculativeConfig(methods, (3,)))
    metrics.on_stats(EngineStats(drafts=(DraftTotals(5, 15, 6, (4, 2)),)))
    values = parse(metrics.exposition().decode()).values
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert values[name] == 6
    assert [values[f"{name}:{position}"] for position in range(3)] == [4, 2, 0]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('sglang:num_running_reqs{model_name="m"}', "num_requests_running"),
        ('sglang:num_queue_reqs{model_name="m"}', "num_requests_waiting"),
        ('sglang:token_usage{model_name="m"}', "kv_cache_usage_perc"),
        ("llamacpp:requests_processing", "num_requests_running"),
        ("llamacpp:requests_deferred", "num_requests_waiting"),
        ("llamacpp:tokens_predicted_total", "generation_tokens_total"),
        ("llamacpp:prompt_tokens_total", "prompt_tokens_total"),
        ("llamacpp:n_decode_total", "n_decode_total"),
        ("tgi_queue_size", "num_requests_waiting"),
        ("tgi_batch_current_size", "num_requests_running"),
        ("tgi_request_generated_tokens_sum", "generation_tokens_total"),
        ("vllm:gpu_cache_usage_perc", "kv_cache_usage_perc"),
    ],
)
def test_engines_mean_the_same_by_other_names(line: str, name: str) -> None:
    assert parse(f"{line} 5\n").values == {name: 5.0}


def test_octavos_own_metrics_are_read() -> None:
    metrics = Metrics("octavo", "m", 128)
    metrics.on_stats(EngineStats(num_running=2, kv_usage=0.5, total_steps=1, step_tokens=9))
    read = parse(metrics.exposition().decode())
    assert read.gauges["num_requests_running"] == 2
    assert read.gauges["kv_cache_usage_perc"] == 0.5
    assert read.values["iteration_tokens_total_sum"] == 9
    assert read.values["iteration_tokens_total_count"] == 1
    assert read.values["num_preemptions_total"] == 0


def test_a_server_without_metrics_has_none() -> None:
    async def hang_up(reply: Reply) -> None:
        reply.hang_up()

    async def run() -> list[Scrape]:
        routes = {
            "GET /metrics": answer("a page"),
            "GET /gone/metrics": hang_up,
            "GET /some/metrics": answer(VLLM),
        }
        async with (
            MockServer(answer(""), routes=routes) as server,
            Connections(server.url) as connections,
        ):
            paths = ("/v1", "/nothing/v1", "/gone/v1", "/some/v1")
            targets = [Target(base_url=server.url + path, model="m") for path in paths]
            return [await scrape(connections, target) for target in targets]

    *without, with_them = asyncio.run(run())
    assert without == [Scrape()] * 3
    assert with_them == parse(VLLM)
