"""One request in the server's metrics."""

from __future__ import annotations

from octavo.core.request import FinishReason, Request
from octavo.core.step import RequestTimes
from octavo.server.metrics import Metrics


class RequestRecord:
    """Measures one accepted request as its client sees it."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        n = request.sampling.n
        self._first: list[float | None] = [None] * n
        self._last = [0.0] * n
        self._num_tokens = [0] * n
        self._unfinished = set(range(n))
        self._is_started = False

    def delivered(self, index: int, num_tokens: int, num_cached: int, now: float) -> None:
        """Sequence `index` got tokens."""
        metrics = self._metrics
        if self._first[index] is None:
            self._first[index] = now
            metrics.first_token.observe(now - self._request.arrival_time)
            if not self._is_started:
                self._start(num_cached)
        else:
            metrics.inter_token.observe(now - self._last[index])
        self._last[index] = now
        self._num_tokens[index] += num_tokens
        metrics.num_generated += num_tokens

    def ended(
        self,
        index: int,
        reason: FinishReason,
        now: float,
        times: RequestTimes | None = None,
        num_preemptions: int = 0,
    ) -> None:
        """Sequence `index` got its last delta; `times` is None if the engine died before that."""
        if index not in self._unfinished:
            return
        self._unfinished.remove(index)
        metrics, num_tokens, first = self._metrics, self._num_tokens[index], self._first[index]
        metrics.ended[reason].inc()
        metrics.num_generation_tokens.observe(num_tokens)
        metrics.num_preemptions.observe(num_preemptions)
        metrics.e2e.observe(now - self._request.arrival_time)
        if first is not None and num_tokens > 1:
            metrics.per_output_token.observe((self._last[index] - first) / (num_tokens - 1))
        if times is not None and times.first_scheduled is not None:
            metrics.queue.observe(times.first_scheduled - times.arrival)
            metrics.inference.observe(times.finished - times.first_scheduled)
            if times.first_token is not None:
                metrics.prefill.observe(times.first_token - times.first_scheduled)
                metrics.decode.observe(times.finished - times.first_token)
        if not self._unfinished:
            metrics.params_n.observe(self._request.sampling.n)
            metrics.params_max_tokens.observe(self._request.max_tokens)
            metrics.most_generation_tokens.observe(max(self._num_tokens))

    def lost(self, reason: FinishReason, now: float) -> None:
        """No more deltas will come for the sequences that have not ended."""
        for index in list(self._unfinished):
            self.ended(index, reason, now)

    def _start(self, num_cached: int) -> None:
        self._is_started = True
        num_prompt = self._request.num_prompt_tokens
        num_computed = num_prompt - num_cached
        metrics = self._metrics
        metrics.prompt_tokens.inc(num_prompt)
        metrics.prompt_tokens_cached.inc(num_cached)
        metrics.prompt_tokens_hit.inc(num_cached)
        metrics.prompt_tokens_computed.inc(num_computed)
        metrics.num_prompt_tokens.observe(num_prompt)
        metrics.num_computed_tokens.observe(num_computed)
