from __future__ import annotations

import pytest

from octavo.core.errors import ConfigError
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import DraftTotals, EngineStats, RequestTimes, StageTime
from octavo.server.metrics import Metrics, _one_two_five
from octavo.server.request_record import RequestRecord
from octavo.speculative_config import SpeculativeConfig

LABELS = '{engine="0",model_name="m"}'


def values(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.exposition().decode().splitlines() if line[0] != "#"]
    label = '{engine="0",model_name="m"}'
    return {
        line.rsplit(" ", 1)[0].replace(label, ""): float(line.rsplit(" ", 1)[1]) for line in lines
    }


def record(metrics: Metrics, n: int = 1) -> RequestRecord:
    sampling = SamplingParams(n=n)
    request = Request(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        sampling=sampling,
        max_tokens=16,
        seed=0,
        arrival_time=10.0,
    )
    return RequestRecord(metrics, request)


def test_prefix_names_and_buckets() -> None:
    text = Metrics("vllm", "m", 300).exposition().decode()
    assert "# TYPE vllm:num_requests_running gauge" in text
    assert "# TYPE vllm:prompt_tokens_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 0.0' in text
    )
    assert _one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]


@pytest.mark.parametrize("prefix", ["", "a-b", "9a", "a b", "é", "a\n", 'a"'])
def test_a_prefix_that_prometheus_cannot_read(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-prefix"):
        Metrics(prefix, "m", 100)


def test_cache_configuration() -> None:
    info = {"block_size": 16, "num_gpu_blocks": 9, "enable_prefix_caching": True}
    assert (
        values(Metrics("octavo", "m", 100, info))[
            'octavo:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",'
            'model_name="m",num_gpu_blocks="9"}'
        ]
        == 1
    )
    assert "cache_config_info" not in Metrics("octavo", "m", 100).exposition().decode()


def test_engine_totals_become_counters() -> None:
    metrics = Metrics("octavo", "m", 100)
    metrics.on_stats(EngineStats(num_running=2, kv_usage=0.5, step_tokens=7, total_steps=1))
    metrics.on_stats(EngineStats(total_prefix_hits=32, total_preemptions=1, total_steps=1))
    found = values(metrics)
    assert found["octavo:num_requests_running"] == 0
    assert found["octavo:prefix_cache_hits_total"] == 32
    assert found["octavo:num_preemptions_total"] == 1
    # The second report was not about a new step.
    assert found["octavo:iteration_tokens_total_count"] == 1
    assert found["octavo:iteration_tokens_total_sum"] == 7


def test_engines_that_live_are_counted() -> None:
    metrics = Metrics("octavo", "m", 100)
    assert values(metrics)["octavo:num_engines_running"] == 1
    metrics.on_stats(EngineStats(num_engines=3))
    assert values(metrics)["octavo:num_engines_running"] == 3


def test_what_became_of_drafts_becomes_counters() -> None:
    methods = ({"method": "ngram"}, {"method": "eagle"})
    metrics = Metrics("vllm", "m", 100, speculation=SpeculativeConfig(methods, (2, 3)))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    positions = [f'{name}{{engine="0",model_name="m",position="{i}"}}' for i in range(3)]
    assert [values(metrics).get(position) for position in positions] == [0, 0, 0]
    first = DraftTotals(4, 8, 3, (2, 1), 0.5, 0.25)
    metrics.on_stats(EngineStats(drafts=(first, DraftTotals())))
    metrics.exposition()
    second = DraftTotals(2, 6, 5, (2, 2, 1), 0.0, 1.5)
    metrics.on_stats(EngineStats(drafts=(first, second)))
    found = values(metrics)
    assert found["vllm:spec_decode_num_drafts_total"] == 6
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 14
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 8
    assert [found[position] for position in positions] == [4, 3, 1]
    for method, saved, wasted in (("ngram", 0.5, 0.25), ("eagle", 0.0, 1.5)):
        labels = f'{{engine="0",method="{method}",model_name="m"}}'
        assert found[f"vllm:spec_decode_seconds_saved_total{labels}"] == saved
        assert found[f"vllm:spec_decode_seconds_wasted_total{labels}"] == wasted


def test_without_speculation_there_are_no_such_counters() -> None:
    for speculation in (None, SpeculativeConfig(())):
        metrics = Metrics("octavo", "m", 100, speculation=speculation)
        assert "spec_decode" not in metrics.exposition().decode()


def test_what_explains_the_throughput_becomes_counters() -> None:
    metrics = Metrics("octavo", "m", 100)
    stats = EngineStats(
        num_kv_blocks=9,
        total_steps=2,
        total_scheduled_sequences=11,
        total_sampled_sequences=7,
        total_taken_slots=16,
        total_kv_tokens=300,
        total_kv_capacity=400,
    )
    metrics.on_stats(stats)
    metrics.exposition()
    metrics.on_stats(stats._replace(total_steps=3, total_kv_capacity=500))
    found = values(metrics)
    expected = {
        "kv_cache_blocks": 9,
        "engine_steps_total": 3,
        "scheduled_sequences_total": 11,
        "sampled_sequences_total": 7,
        "taken_slots_total": 16,
        "kv_tokens_total": 300,
        "kv_capacity_tokens_total": 500,
    }
    assert {name: found[f"octavo:{name}"] for name in expected} == expected


def test_latencies_of_a_request() -> None:
    metrics = Metrics("octavo", "m", 100)
    request = record(metrics)
    request.delivered(0, 1, 2, now=11.0)
    request.delivered(0, 1, 2, now=11.5)
    request.delivered(0, 2, 2, now=12.0)
    request.ended(0, FinishReason.LENGTH, 12.25, RequestTimes(10.0, 10.5, 10.75, 12.0), 3)
    found = values(metrics)
    sums = {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 1.0,
        "request_time_per_output_token_seconds": 1.0 / 3,
        "e2e_request_latency_seconds": 2.25,
        "request_queue_time_seconds": 0.5,
        "request_inference_time_seconds": 1.5,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 1.25,
        "request_prompt_tokens": 3,
        "request_prefill_kv_computed_tokens": 1,
        "request_generation_tokens": 4,
        "request_max_num_generation_tokens": 4,
        "request_params_max_tokens": 16,
        "request_num_preemptions": 3,
    }
    assert {name: found[f"octavo:{name}_sum"] for name in sums} == pytest.approx(sums)
    assert found["octavo:inter_token_latency_seconds_count"] == 2
    assert found["octavo:prompt_tokens_total"] == 3
    assert found["octavo:prompt_tokens_cached_total"] == 2
    by_source = 'octavo:prompt_tokens_by_source_total{engine="0",model_name="m",source="%s"}'
    assert found[by_source % "local_compute"] == 1
    assert found[by_source % "local_cache_hit"] == 2
    assert found["octavo:generation_tokens_total"] == 4


def test_prompt_counts_once_per_request_and_sequences_each() -> None:
    metrics = Metrics("octavo", "m", 100)
    request = record(metrics, n=2)
    request.delivered(0, 1, 0, now=11.0)
    request.delivered(1, 1, 0, now=11.0)
    request.ended(0, FinishReason.STOP, 12.0)
    assert values(metrics)["octavo:request_params_n_count"] == 0
    request.lost(FinishReason.ABORT, 12.0)
    request.lost(FinishReason.ABORT, 13.0)  # once is enough
    found = values(metrics)
    assert found["octavo:prompt_tokens_total"] == found["octavo:request_prompt_tokens_sum"] == 3
    assert found["octavo:generation_tokens_total"] == 2
    assert found["octavo:request_params_n_sum"] == 2
    for reason, count in {"stop": 1, "abort": 1, "length": 0}.items():
        name = (
            f'octavo:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}'
        )
        assert found[name] == count


def test_stages_have_their_times_and_what_is_left() -> None:
    metrics = Metrics("octavo", "m", 100)
    assert "stage" not in metrics.exposition().decode()
    stages = (StageTime(3.0, 0.5), StageTime(1.0, 0.25))
    metrics.on_stats(EngineStats(stages=stages, total_in_flight_seconds=4.0))
    shown = values(metrics)
    assert shown["octavo:stage_idle_perc"] == 0.5
    assert shown["octavo:steps_in_flight_seconds_total"] == 4.0
    busy = 'octavo:stage_busy_seconds_total{engine="0",model_name="m",stage="%d"}'
    assert (shown[busy % 0], shown[busy % 1]) == (3.0, 1.0)
    exchange = 'octavo:stage_exchange_seconds_total{engine="0",model_name="m",stage="1"}'
    assert shown[exchange] == 0.25
    stages = (StageTime(5.0, 0.5), StageTime(2.0, 0.25))
    metrics.on_stats(EngineStats(stages=stages, total_in_flight_seconds=6.0))
    shown = values(metrics)
    assert (shown[busy % 0], shown["octavo:stage_idle_perc"]) == (5.0, 0.25)
    assert values(metrics)["octavo:stage_idle_perc"] == 0.0  # nothing ran
