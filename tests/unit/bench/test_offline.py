from __future__ import annotations

import pytest

from octavo.bench import offline
from octavo.bench.offline import ThroughputReport, measure_latency, measure_throughput
from octavo.config import Config
from octavo.core.errors import ConfigError, OctavoError
from octavo.llm import LLM, RequestOutput


def test_latency_measures_each_batch_with_new_prompts(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[RequestOutput] = []
    generate = LLM.generate

    def recorded(*args: object, **kwargs: object) -> list[RequestOutput]:
        found = generate(*args, **kwargs)  # type: ignore[arg-type]
        outputs.extend(found)
        return found

    monkeypatch.setattr(LLM, "generate", recorded)
    report = measure_latency(
        Config.from_flat({"model": tiny}),
        input_len=20,
        output_len=5,
        batch_size=3,
        num_iters=2,
        num_iters_warmup=1,
        temperature=1.0,
    )
    assert len(report.latencies_s) == 2
    assert min(report.latencies_s) > 0
    assert report.ttft_ms is not None
    assert report.tpot_ms is not None
    assert report.ttft_ms.count == report.tpot_ms.count == 6  # without the warm-up
    assert report.ttft_ms.highest <= 1000 * max(report.latencies_s)
    assert report.num_cached_tokens == 0
    middle = sum(report.latencies_s) / 2
    assert report.output_tokens_per_second == pytest.approx(3 * 5 / middle)
    prompts = [tuple(output.prompt_token_ids) for output in outputs]
    assert len(set(prompts)) == len(prompts) == 9
    assert {len(output.outputs[0].token_ids) for output in outputs} == {5}


def test_throughput_counts_what_it_asked_for(tiny: str) -> None:
    report = measure_throughput(
        Config.from_flat({"model": tiny, "seed": 3}),
        input_len=20,
        output_len=8,
        range_ratio=0.5,
        num_prompts=6,
        num_warmups=2,
        temperature=1.0,
    )
    assert 6 * 10 <= report.num_prompt_tokens <= 6 * 30
    assert 6 * 4 <= report.num_output_tokens <= 6 * 12
    assert report.num_steps >= 4  # the warm-up's are not among them
    assert report.num_cached_tokens == 0
    assert report.settings["model"]


def test_throughput_is_tokens_over_time() -> None:
    report = ThroughputReport({}, 4, 100, 0, 60, 0, 10, elapsed_s=2.0)
    assert report.requests_per_second == 2.0
    assert report.output_tokens_per_second == 30.0
    assert report.tokens_per_second == 80.0


def test_what_does_not_fit_is_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match="more than the 64 tokens of the context"):
        measure_latency(
            Config.from_flat({"model": tiny, "max_model_len": 64}),
            input_len=60,
            output_len=5,
            batch_size=1,
            num_iters=1,
            num_iters_warmup=0,
            temperature=0.0,
        )


def test_a_request_that_ends_early_is_no_measurement(tiny: str) -> None:
    llm = LLM(tiny)
    outputs = llm.generate([[1, 2, 3]], offline._forced(4, 0.0))
    llm.shutdown()
    with pytest.raises(OctavoError, match=r"of 5 tokens ended after 4 \(length\)"):
        offline._check_lengths(outputs, [5])
