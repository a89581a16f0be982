"""What a server says of itself: its /metrics, under the same names whatever the engine."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from octavo.bench.load.http1 import Connections, fetch
from octavo.bench.load.target import Target

_PREFIX = "(?:octavo:|vllm:|sglang:|llamacpp:|tgi_|trtllm_)"
_LINE = re.compile(rf"^{_PREFIX}(\w+)(?:{{(.*)}})? (\S+)", re.M)
_POSITION = re.compile(r'position="(\d+)"')
_GAUGE = re.compile(rf"^# TYPE {_PREFIX}(\w+) gauge", re.M)
# Other engines' names for what vLLM, and Octavo after it, calls so.
_NAMES: Final = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",  # vLLM before 0.10
    "num_running_reqs": "num_requests_running",  # SGLang
    "num_queue_reqs": "num_requests_waiting",
    "token_usage": "kv_cache_usage_perc",
    "cached_tokens_total": "prompt_tokens_cached_total",
    "requests_processing": "num_requests_running",  # llama.cpp
    "requests_deferred": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "tokens_predicted_total": "generation_tokens_total",
    "batch_current_size": "num_requests_running",  # TGI
    "queue_size": "num_requests_waiting",
    "request_input_length_sum": "prompt_tokens_total",
    "request_generated_tokens_sum": "generation_tokens_total",
}
_SHARES: Final = frozenset({"kv_cache_usage_perc", "cache_hit_rate"})
_LEFT_OUT: Final = ("_bucket", "_created", "_info")
_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True)
class Scrape:
    """values: of counters, gauges, and histograms' _sum and _count. gauges: those among them that
    tell the state of this instant.
    """

    values: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


def parse(text: str) -> Scrape:
    """Prometheus' text format. Names lose the engine's prefix and are vLLM's where it has one.
    Series that differ in labels only are added up; shares (0 to 1) are averaged. Those of positions
    are there one by one, too, as NAME:POSITION.
    """
    found = defaultdict(list)
    for name, labels, value in _LINE.findall(text):
        if name.endswith(_LEFT_OUT):
            continue
        found[_NAMES.get(name, name)].append(float(value))
        if position := _POSITION.search(labels):
            found[f"{name}:{position[1]}"].append(float(value))
    values = {
        name: sum(values) / (len(values) if name in _SHARES else 1)
        for name, values in found.items()
    }
    gauges = {_NAMES.get(name, name) for name in _GAUGE.findall(text)}
    return Scrape(values, {name: values[name] for name in gauges & values.keys()})


async def scrape(connections: Connections, target: Target) -> Scrape:
    """Of a server that has no /metrics, nothing."""
    try:
        exchange = await fetch(connections, "GET", f"{target.root}/metrics", timeout_s=_TIMEOUT_S)
    except (ConnectionError, TimeoutError):
        return Scrape()
    if exchange.status != 200:
        return Scrape()
    return parse(exchange.body.decode(errors="replace"))
