"""The result file of `vllm bench serve` (vllm/benchmarks/serve.py), for tools that read it.

Its keys keep vLLM's definitions, which are not ours: times start when a request was sent, however
late; end-to-end latency ends at the last chunk with output; rates divide by the whole duration,
from the first request that was due to the last that ended; goodput leaves failed requests out and
takes the TPOT of a reply with one token as 0; "tokens" per second at the peak are chunks; what has
no values is 0, not missing. Our own figures are in run.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from octavo.bench.load.plan import PointRun
from octavo.bench.load.target import Target
from octavo.bench.metrics import METRICS
from octavo.bench.records import RequestRecord
from octavo.core.errors import ConfigError

_NS = 1e9
_BACKENDS = {"completions": "openai", "chat": "openai-chat"}
_GOODPUT_NAMES = ("ttft", "tpot", "e2el")


def vllm_result(
    run: PointRun,
    target: Target,
    *,
    date: datetime,
    label: str | None = None,
    burstiness: float = 1.0,
    goodput_ms: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99,),
    metadata: Mapping[str, str] | None = None,
    is_detailed: bool = False,
) -> dict[str, Any]:
    """burstiness: the shape of the gamma distribution of gaps, 1 for Poisson. goodput_ms: limits by
    "ttft", "tpot" and "e2el". percentiles: 0 to 100. is_detailed: with the times and texts of each
    request. Raises ConfigError for a limit of another name.
    """
    good = [record for record in run.records if record.is_ok]
    duration_s = (run.end_ns - run.start_ns) / _NS
    num_input = sum(map(_input_length, good))
    num_output = sum(record.num_output_tokens for record in good)
    tokens_per_second, active = _busiest_second(good)
    backend = _BACKENDS[target.api]
    result: dict[str, Any] = {
        "date": f"{date:%Y%m%d-%H%M%S}",
        "endpoint_type": backend,
        "backend": backend,
        "label": label,
        "model_id": target.model,
        "tokenizer_id": target.model,
        "num_prompts": len(run.records),
        **(metadata or {}),
        "request_rate": "inf" if run.point.rate is None else run.point.rate,
        "burstiness": burstiness,
        "max_concurrency": run.point.concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": _num_good(good, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": tokens_per_second,
        "max_concurrent_requests": active,
        "rtfx": 0.0,  # of audio
    }
    if is_detailed:
        result |= _detailed(run.records)
    for name, values in _samples_ms(good).items():
        result |= _summary(name, values, percentiles)
    return result | _drafts(run)


def result_filename(result: Mapping[str, Any]) -> str:
    """Where vLLM would write it: openai-infqps-concurrency8-SmolLM2-135M-20261130-051500.json"""
    concurrency = result["max_concurrency"]
    parts = [
        result["label"] or result["backend"],
        f"{result['request_rate']}qps",
        *([] if concurrency is None else [f"concurrency{concurrency}"]),
        result["model_id"].rsplit("/", 1)[-1],
        result["date"],
    ]
    return "-".join(parts).replace("/", "_") + ".json"


def _samples_ms(good: Sequence[RequestRecord]) -> dict[str, list[float]]:
    def values(metric: str) -> list[float]:
        return [value for record in good for value in METRICS[metric].values(record)]

    return {
        "ttft": values("ttft_send"),
        "tpot": values("tpot"),
        "itl": values("itl"),
        "e2el": [1e3 * _latency_s(record) for record in good],
    }


def _summary(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    sample = np.array(values or [0.0])
    return {
        f"mean_{name}_ms": float(sample.mean()),
        f"median_{name}_ms": float(np.median(sample)),
        f"std_{name}_ms": float(sample.std()),
        **{f"p{p:g}_{name}_ms": float(np.percentile(sample, p)) for p in percentiles},
    }


def _drafts(run: PointRun) -> dict[str, Any]:
    """What became of guessed tokens, by the server's counters; nothing if none were guessed. The
    acceptance rate is in per cent, those of positions are shares of all drafts.
    """

    def grown(name: str) -> float:
        name = f"spec_decode_{name}_total"
        return run.counters_after.get(name, 0.0) - run.counters_before.get(name, 0.0)

    drafts, drafted = grown("num_drafts"), grown("num_draft_tokens")
    if not drafts or not drafted:
        return {}
    accepted = grown("num_accepted_tokens")
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    by_position: list[float] = []
    while (key := f"{name}:{len(by_position)}") in run.counters_after:
        count = run.counters_after[key] - run.counters_before.get(key, 0.0)
        by_position.append(count / drafts)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": by_position,
    }


def _num_good(good: Sequence[RequestRecord], limits_ms: Mapping[str, float]) -> int:
    for name in limits_ms:
        if name not in _GOODPUT_NAMES:
            raise ConfigError(
                f"goodput has no limit {name!r}: use {', '.join(_GOODPUT_NAMES)}, as in ttft:500"
            )
    return sum(
        all(_goodput_value_ms(record, name) <= limit for name, limit in limits_ms.items())
        for record in good
    )


def _goodput_value_ms(record: RequestRecord, name: str) -> float:
    if name == "e2el":
        return 1e3 * _latency_s(record)
    return _first(METRICS["ttft_send" if name == "ttft" else "tpot"].values(record))


def _busiest_second(good: Sequence[RequestRecord]) -> tuple[float, int]:
    """The most chunks in one second, and the most requests that were active in one; seconds count
    from when the first was sent.
    """
    start = min((_sent_ns(record) for record in good), default=0)
    chunks: Counter[int] = Counter()
    active: Counter[int] = Counter()
    for record in good:
        chunks.update(int((ns - start) / _NS) for ns in record.chunk_ns)
        first = (_sent_ns(record) - start) / _NS
        active.update(range(int(first), int(first + _latency_s(record)) + 1))
    return float(max(chunks.values(), default=0)), max(active.values(), default=0)


def _detailed(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """In seconds; a failed request has zeros and its error."""
    return {
        "input_lens": [_input_length(record) for record in records],
        "output_lens": [record.num_output_tokens if record.is_ok else 0 for record in records],
        "ttfts": [_first(METRICS["ttft_send"].values(record)) / 1e3 for record in records],
        "itls": [[gap / 1e3 for gap in METRICS["itl"].values(record)] for record in records],
        "start_times": [_sent_ns(record) / _NS for record in records],
        "generated_texts": [record.text or "" for record in records],
        "errors": ["" if r.is_ok else r.error or str(r.failure) for r in records],
    }


def _first(values: Sequence[float]) -> float:
    return values[0] if values else 0.0


def _sent_ns(record: RequestRecord) -> int:
    return record.scheduled_ns if record.sent_ns is None else record.sent_ns


def _latency_s(record: RequestRecord) -> float:
    """From sending to the last chunk with output; without one, to the end of the stream."""
    end = record.chunk_ns[-1] if record.chunk_ns else record.done_ns
    return 0.0 if end is None else (end - _sent_ns(record)) / _NS


def _input_length(record: RequestRecord) -> int:
    return record.prompt_len if record.num_prompt_tokens is None else record.num_prompt_tokens
