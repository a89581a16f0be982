"""Prometheus metrics under vLLM's names.

The rules of counting: a sequence is one of a request's `n` answers. Token counters and histograms
are fed by what was delivered, so once nothing runs they agree exactly:

- prompt_tokens_total is the sum of request_prompt_tokens: a request counts in both when its first
  token arrives, once whatever its `n`.
- generation_tokens_total is the sum of request_generation_tokens: tokens up to the one that
  completed a stop string, as in `usage`; the histogram counts a sequence when it ends, also one
  that was aborted.
- request_success_total and the latencies count sequences; a refused request counts nowhere but,
  where the queue was full, in admission_rejections_total.

What explains the throughput has no name in vLLM. These counters are sums over engine steps, so that
the quotient of what two of them have grown by is a mean over the time between two scrapes:

- scheduled_sequences_total / engine_steps_total is the mean batch, sampled_sequences_total /
  engine_steps_total the tokens that a step generates (iteration_tokens_total: that it computes).
- scheduled_sequences_total / taken_slots_total is the slot efficiency: under --batching static the
  slots of ended sequences stay taken until the batch has ended as a whole.
- 1 - kv_tokens_total / kv_capacity_tokens_total is the share of KV memory that is given to
  sequences and holds nothing. Blocks that sequences share count once; blocks that nobody holds, but
  where a prefix may still be found, do not count.

Where workers compute the model (--tensor-parallel-size, --pipeline-parallel-size), and only there:

- stage_idle_perc is the share of the stages' time in which they had nothing to compute although a
  step was in flight, since the last scrape: the bubble of a pipeline; of one stage, what messages
  to and from it take. For any two scrapes it is 1 - the sum of stage_busy_seconds_total over the
  stages / (their number * steps_in_flight_seconds_total). The busiest stage sets the pace.
- stage_exchange_seconds_total / stage_busy_seconds_total is the share of communication between
  tensor-parallel ranks, waiting for each other included.

Where tokens are guessed (--speculative-config), and only there, as in vLLM:

- spec_decode_num_accepted_tokens_total / spec_decode_num_draft_tokens_total is the acceptance rate,
  1 + spec_decode_num_accepted_tokens_total / spec_decode_num_drafts_total the tokens that a step
  gives for a draft. Position 0 of spec_decode_num_accepted_tokens_per_pos_total counts drafts whose
  first token was accepted.
- spec_decode_seconds_saved_total - spec_decode_seconds_wasted_total is what a method has gained; 0
  with fixed lengths, where nothing measures it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from octavo.core.errors import ConfigError
from octavo.core.request import FinishReason
from octavo.core.step import DraftTotals, EngineStats, StageTime
from octavo.speculative_config import SpeculativeConfig

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_:]*")
_LABELS = ("model_name", "engine")
_ENGINE = "0"

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_MAX_UNOBSERVED = 4096
"""Values that are kept for a histogram until somebody looks."""
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

# Field of EngineStats: name and description of the counter.
_MECHANISM = {
    "total_steps": ("engine_steps", "Steps of the engine."),
    "total_scheduled_sequences": (
        "scheduled_sequences", "Sequences that had tokens computed, summed over steps.",
    ),
    "total_sampled_sequences": (
        "sampled_sequences", "Sequences that came to a new token, summed over steps.",
    ),
    "total_taken_slots": (
        "taken_slots", "Slots that no other sequence could have, summed over steps.",
    ),
    "total_kv_tokens": (
        "kv_tokens", "Tokens kept in KV blocks in use, summed over steps.",
    ),
    "total_kv_capacity": (
        "kv_capacity_tokens", "Tokens that KV blocks in use have places for, summed over steps.",
    ),
}  # fmt: skip


class Metrics:
    """All metrics of one served model, in a registry of their own.

    cache_info: labels of cache_config_info. speculation: what guesses. Raises ConfigError for a
    prefix that can't be one.
    """

    def __init__(
        self,
        prefix: str,
        model_name: str,
        max_model_len: int,
        cache_info: Mapping[str, object] | None = None,
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(
                "--metrics-prefix must begin with a letter or _ and go on with letters, digits, _ "
                f"and :, got {prefix!r}; use octavo or vllm"
            )
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._values = (model_name, _ENGINE)
        self._stats = self._shown = EngineStats()
        self._families: dict[str, Counter] = {}
        lengths = _one_two_five(max_model_len)

        self._engines = self._gauge("num_engines_running", "Engines that live.")
        self._running = self._gauge("num_requests_running", "Sequences that hold a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait for one.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._kv_blocks = self._gauge("kv_cache_blocks", "KV blocks in use.")
        self._step_tokens = _LazyHistogram(
            self._histogram(
                "iteration_tokens_total", "Tokens computed per engine step.", _STEP_TOKENS
            )
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._preemptions = self._counter(
            "num_preemptions", "Sequences whose KV blocks were taken away."
        )
        self._restarts = self._counter(
            "engine_restarts", "Starts after processes of the engine have died."
        )
        self._mechanism = {
            field: self._counter(name, doc) for field, (name, doc) in _MECHANISM.items()
        }

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        self.prompt_tokens_computed, self.prompt_tokens_hit = [
            self._counter(
                "prompt_tokens_by_source", "Where prompt tokens came from.", source=source
            )
            for source in ("local_compute", "local_cache_hit")
        ]
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.num_generated = 0
        """Tokens that `exposition` has yet to count."""
        self.num_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", lengths
        )
        self.num_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed, not cached.",
            lengths,
        )
        self.num_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence.", lengths
        )
        self.most_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sequence.", lengths
        )
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Tokens that a sequence might have at most.", lengths
        )
        self.params_n = self._histogram(
            "request_params_n", "Sequences of a request.", (1, 2, 5, 10, 20)
        )
        self.num_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a sequence.", (1, 2, 3, 4, 5, 10, 20)
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS
        )
        self.inter_token = _LazyHistogram(
            self._histogram(
                "inter_token_latency_seconds", "Between a sequence's deliveries.", _TOKEN_SECONDS
            )
        )
        self.per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "First to last token, per token after the first.",
            _TOKEN_SECONDS,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to end.", _REQUEST_SECONDS
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "Arrival to first step.", _REQUEST_SECONDS
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "First step to end.", _REQUEST_SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", _REQUEST_SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "First token to end.", _REQUEST_SECONDS
        )
        self.ended = {
            reason: self._counter("request_success", "Ended sequences.", finished_reason=reason)
            for reason in map(str, FinishReason)
        }
        self.queue_full = self._counter(
            "admission_rejections",
            "Requests refused because too many wait.",
            reason="max_num_queued_reqs",
        )
        self._stages: _StageMetrics | None = None  # until a step of workers has been seen
        self._drafts: _DraftCounters | None = None
        if speculation is not None and speculation.methods:
            self._drafts = _DraftCounters(self._counter, speculation)
        if cache_info:
            self._info("cache_config_info", "The KV cache's configuration.", cache_info)

    def on_stats(self, stats: EngineStats) -> None:
        """The engine's news after a step. Shown when somebody looks: the gauges and counters would
        take a tenth of a millisecond of each step.
        """
        if stats.total_steps != self._stats.total_steps:
            self._step_tokens.observe(stats.step_tokens)
        self._stats = stats

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        last, stats = self._shown, self._stats
        self._engines.set(stats.num_engines)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)
        self._kv_blocks.set(stats.num_kv_blocks)
        self._prefix_queries.inc(stats.total_prefix_queries - last.total_prefix_queries)
        self._prefix_hits.inc(stats.total_prefix_hits - last.total_prefix_hits)
        self._preemptions.inc(stats.total_preemptions - last.total_preemptions)
        self._restarts.inc(stats.total_restarts - last.total_restarts)
        for field, counter in self._mechanism.items():
            counter.inc(getattr(stats, field) - getattr(last, field))
        if stats.stages:
            if self._stages is None:
                self._stages = _StageMetrics(self._gauge, self._counter, len(stats.stages))
            self._stages.show(last, stats)
        if self._drafts is not None:
            self._drafts.count(last, stats)
        self._step_tokens.catch_up()
        self.inter_token.catch_up()
        self._generation_tokens.inc(self.num_generated)
        self.num_generated = 0
        self._shown = stats
        return generate_latest(self.registry)

    def _gauge(self, name: str, doc: str) -> Gauge:
        metric = Gauge(self._name(name), doc, _LABELS, registry=self.registry)
        return metric.labels(*self._values)

    def _info(self, name: str, doc: str, labels: Mapping[str, object]) -> None:
        names = (*_LABELS, *labels)
        metric = Gauge(self._name(name), doc, names, registry=self.registry)
        metric.labels(*self._values, *map(str, labels.values())).set(1)

    def _counter(self, name: str, doc: str, **label: str) -> Counter:
        known = self._families.get(name)
        if known is None:
            labels = (*_LABELS, *label)
            known = Counter(self._name(name), doc, labels, registry=self.registry)
            self._families[name] = known
        return known.labels(*self._values, *label.values())

    def _histogram(self, name: str, doc: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(self._name(name), doc, _LABELS, buckets=buckets, registry=self.registry)
        return metric.labels(*self._values)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"


class _StageMetrics:
    """What the workers' time goes into."""

    def __init__(
        self, gauge: Callable[..., Gauge], counter: Callable[..., Counter], num_stages: int
    ) -> None:
        self._idle = gauge(
            "stage_idle_perc", "Share of stages' time without work while steps ran, 0 to 1."
        )
        self._in_flight = counter(
            "steps_in_flight_seconds", "In which steps were being computed, summed over engines."
        )
        self._busy, self._exchange = [
            [counter(f"stage_{name}_seconds", doc, stage=str(i)) for i in range(num_stages)]
            for name, doc in (
                ("busy", "Computing, from a stage's input to its result."),
                ("exchange", "Of that, exchanges between tensor-parallel ranks."),
            )
        ]

    def show(self, last: EngineStats, stats: EngineStats) -> None:
        idle = stats.idle_share_since(last)
        self._idle.set(0.0 if idle is None else idle)
        self._in_flight.inc(stats.total_in_flight_seconds - last.total_in_flight_seconds)
        before = last.stages or (StageTime(0.0),) * len(stats.stages)
        for stage, (old, new) in enumerate(zip(before, stats.stages, strict=True)):
            self._busy[stage].inc(new.busy_seconds - old.busy_seconds)
            self._exchange[stage].inc(new.exchange_seconds - old.exchange_seconds)


class _DraftCounters:
    """What becomes of drafts: vLLM's counters over all methods, and each method's seconds."""

    def __init__(self, counter: Callable[..., Counter], speculation: SpeculativeConfig) -> None:
        self._num_drafts = counter("spec_decode_num_drafts", "Drafts that were verified.")
        self._num_draft_tokens = counter(
            "spec_decode_num_draft_tokens", "Guessed tokens that were verified."
        )
        self._num_accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Guessed tokens that the model confirmed."
        )
        self._per_position = [
            counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafts whose token at this position was confirmed.",
                position=str(position),
            )
            for position in range(speculation.max_length)
        ]
        methods = [str(method["method"]) for method in speculation.methods]
        self._saved, self._wasted = [
            [counter(f"spec_decode_seconds_{name}", doc, method=method) for method in methods]
            for name, doc in (
                ("saved", "Decoding that confirmed tokens have spared, less verifying them."),
                ("wasted", "Guessing, and verifying tokens that were not confirmed."),
            )
        ]

    def count(self, last: EngineStats, stats: EngineStats) -> None:
        """Add what has happened since `last`."""
        before, now = last.all_drafts, stats.all_drafts
        self._num_drafts.inc(now.num_drafts - before.num_drafts)
        self._num_draft_tokens.inc(now.num_draft_tokens - before.num_draft_tokens)
        self._num_accepted_tokens.inc(now.num_accepted_tokens - before.num_accepted_tokens)
        old_counts = before.num_accepted_per_position
        for position, count in enumerate(now.num_accepted_per_position):
            old = old_counts[position] if position < len(old_counts) else 0
            self._per_position[position].inc(count - old)
        for method, totals in enumerate(stats.drafts):
            old_totals = last.drafts[method] if last.drafts else DraftTotals()
            self._saved[method].inc(totals.seconds_saved - old_totals.seconds_saved)
            self._wasted[method].inc(totals.seconds_wasted - old_totals.seconds_wasted)


class _LazyHistogram:
    """A histogram that takes its values when somebody looks: each would cost 5 us or more between
    two tokens.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._unobserved: list[float] = []

    def observe(self, value: float) -> None:
        self._unobserved.append(value)
        if len(self._unobserved) >= _MAX_UNOBSERVED:
            self.catch_up()

    def catch_up(self) -> None:
        for value in self._unobserved:
            self._histogram.observe(value)
        self._unobserved.clear()


def _one_two_five(highest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `highest`."""
    buckets = []
    scale = 1
    while scale <= highest:
        buckets += [digit * scale for digit in (1, 2, 5) if digit * scale <= highest]
        scale *= 10
    return buckets
