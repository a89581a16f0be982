"""vLLM's result file: its keys, with its definitions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from octavo.bench.load.plan import ClientLoad, LoadPoint, PointRun
from octavo.bench.load.target import Target
from octavo.bench.output.vllm_result import result_filename, vllm_result
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.core.errors import ConfigError

MS = 1_000_000
TARGET = Target(base_url="http://127.0.0.1:8000/v1", model="org/SmolLM2-135M")

# `vllm bench serve --save-result`, in its order.
KEYS = [
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx",
    *(
        f"{which}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for which in ("mean", "median", "std", "p99")
    ),
]  # fmt: skip
DETAILS = [
    "input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors",
]  # fmt: skip


def record(index: int, sent_ms: int, chunk_ms: list[int], **changes: Any) -> RequestRecord:
    """Due 40 ms before it was sent; its chunks come so long after that, its end 5 ms later."""
    values: dict[str, Any] = {
        "index": index,
        "class_name": "chat",
        "scheduled_ns": (sent_ms - 40) * MS,
        "prompt_len": 10,
        "max_tokens": len(chunk_ms),
        "sent_ns": sent_ms * MS,
        "chunk_ns": [(sent_ms + ms) * MS for ms in chunk_ms],
        "done_ns": (sent_ms + (chunk_ms[-1] if chunk_ms else 0) + 5) * MS,
        "num_prompt_tokens": 12,
        "num_output_tokens": len(chunk_ms),
        "token_source": TokenSource.USAGE,
        "text": "word",
    }
    return RequestRecord(**(values | changes))


def run_of(*records: RequestRecord, **point: Any) -> PointRun:
    """Of four seconds."""
    return PointRun(
        point=LoadPoint(label="", requests=(), **(point or {"concurrency": 8})),
        start_ns=0,
        end_ns=4_000 * MS,
        records=records,
        client=ClientLoad(num_workers=1, cpu_share=0.1, lag_p99_ms=40.0),
    )


RUN = run_of(
    record(0, 100, [200, 250, 350]),
    record(1, 500, [300]),  # one token: without TPOT
    record(2, 1200, [100, 200], num_output_tokens=3),  # two tokens in one chunk
    record(3, 1300, [], failure=Failure.OVERLOADED, error="HTTP 429"),
)


def result(run: PointRun = RUN, **options: Any) -> dict[str, Any]:
    return vllm_result(run, TARGET, date=datetime(2026, 11, 30, 5, 15), **options)


def test_it_has_the_keys_of_vllm() -> None:
    assert list(result()) == KEYS
    assert list(result(is_detailed=True)) == [*KEYS[:22], *DETAILS, *KEYS[22:]]
    json.dumps(result(is_detailed=True), allow_nan=False)


def test_times_start_when_a_request_was_sent_and_end_with_its_last_chunk() -> None:
    found = result()
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(81.65, abs=0.01)  # of a population
    assert found["p99_ttft_ms"] == pytest.approx(298)
    assert found["mean_e2el_ms"] == pytest.approx((350 + 300 + 200) / 3)
    assert found["mean_tpot_ms"] == pytest.approx((75 + 50) / 2)
    assert found["mean_itl_ms"] == pytest.approx((50 + 100 + 100) / 3)


def test_rates_are_of_the_whole_duration_and_of_what_succeeded() -> None:
    found = result()
    assert (found["completed"], found["failed"], found["num_prompts"]) == (3, 1, 4)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (36, 7)
    assert found["request_throughput"] == 3 / 4
    assert found["output_throughput"] == 7 / 4
    assert found["total_token_throughput"] == 43 / 4


def test_what_became_of_guessed_tokens() -> None:
    position = "spec_decode_num_accepted_tokens_per_pos_total"
    before = {
        "spec_decode_num_drafts_total": 10.0,
        "spec_decode_num_draft_tokens_total": 30.0,
        "spec_decode_num_accepted_tokens_total": 12.0,
        f"{position}:0": 8.0,
        f"{position}:1": 4.0,
    }
    growths = (20, 50, 25, 15, 10)
    after = {name: before[name] + growth for name, growth in zip(before, growths, strict=True)}
    found = result(replace(RUN, counters_before=before, counters_after=after))
    assert {name: found[name] for name in found if name not in KEYS} == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.25,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 50,
        "spec_decode_accepted_tokens": 25,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5],
    }
    assert list(result(replace(RUN, counters_before=before, counters_after=before))) == KEYS


def test_peaks_are_of_seconds_since_the_first_was_sent() -> None:
    found = result()
    assert found["max_output_tokens_per_s"] == 4  # chunks of the first two requests
    assert found["max_concurrent_requests"] == 2


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft": 200}, 2),  # inclusive; a failed request is no miss
        ({"tpot": 60}, 2),  # a single token has a TPOT of 0
        ({"ttft": 200, "tpot": 60}, 1),
        ({"e2el": 300}, 2),
    ],
)
def test_goodput_is_by_vllms_rule(limits: dict[str, float], num_good: int) -> None:
    assert result(goodput_ms=limits)["request_goodput"] == num_good / 4
    assert result()["request_goodput"] is None


def test_a_limit_that_goodput_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match="no limit 'itl': use ttft, tpot, e2el"):
        result(goodput_ms={"itl": 10})


def test_details_are_of_all_requests_in_seconds() -> None:
    found = result(is_detailed=True)
    assert found["input_lens"] == [12, 12, 12, 12]
    assert found["output_lens"] == [3, 1, 3, 0]
    assert found["ttfts"] == pytest.approx([0.2, 0.3, 0.1, 0])
    assert found["itls"] == [pytest.approx([0.05, 0.1]), [], pytest.approx([0.1]), []]
    assert found["start_times"] == pytest.approx([0.1, 0.5, 1.2, 1.3])
    assert found["errors"] == ["", "", "", "HTTP 429"]
    assert found["generated_texts"][0] == "word"


def test_a_run_without_any_reply_has_zeros() -> None:
    """BEN-01: of a TPOT without values, too; neither inf nor nan."""
    found = result(run_of(record(0, 100, [], failure=Failure.TIMEOUT)))
    assert found["completed"] == found["mean_ttft_ms"] == found["p99_tpot_ms"] == 0
    only_first_tokens = result(run_of(record(0, 100, [50])))
    assert only_first_tokens["mean_tpot_ms"] == only_first_tokens["mean_itl_ms"] == 0


def test_percentiles_and_metadata_are_as_asked() -> None:
    found = result(percentiles=(50, 99.9), metadata={"gpu": "none"})
    assert found["p50_ttft_ms"] == found["median_ttft_ms"]
    assert "p99.9_itl_ms" in found
    assert "p99_itl_ms" not in found
    assert found["gpu"] == "none"


def test_the_files_name_is_vllms() -> None:
    assert (
        result_filename(result()) == "openai-infqps-concurrency8-SmolLM2-135M-20261130-051500.json"
    )
    open_loop = result(run_of(record(0, 100, [50]), rate=2.5), label="mine/a")
    assert open_loop["request_rate"] == 2.5
    assert open_loop["max_concurrency"] is None
    assert result_filename(open_loop) == "mine_a-2.5qps-SmolLM2-135M-20261130-051500.json"


def test_a_chat_is_vllms_chat_backend() -> None:
    target = Target(base_url="http://127.0.0.1:8000/v1", model="m", api="chat")
    found = vllm_result(RUN, target, date=datetime(2026, 11, 30))
    assert found["backend"] == found["endpoint_type"] == "openai-chat"
