"""What one sequence's life says of the engine, in the words of vLLM's responses."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.step import DraftCounts, RequestTimes


@dataclass(frozen=True)
class SpecDecodeMetrics:
    """num_drafts: that had tokens. acceptance_rate: of the draft tokens, those that the model
    confirmed, 0 to 1. mean_acceptance_length: tokens that a step with a draft gave, the model's own
    included, so 1 to one more than the longest draft.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    mean_acceptance_length: float


@dataclass(frozen=True)
class RequestMetrics:
    """None where the sequence ended before it could be known.

    time_to_first_token_ms: from arrival, as in /metrics (vLLM leaves the queue out here).
    generation_time_ms: from the first token to the end. queue_time_ms: from arrival to the first
    step. mean_itl_ms: of the generation time, by token after the first. tokens_per_second: from the
    first step to the end. speculative_decoding: None if no tokens were guessed.
    """

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpecDecodeMetrics | None


def spec_decode_metrics(counts: DraftCounts | None) -> SpecDecodeMetrics | None:
    """None if no tokens were guessed."""
    if counts is None or not counts.num_drafts:
        return None
    return SpecDecodeMetrics(
        *counts,
        acceptance_rate=counts.num_accepted_tokens / counts.num_draft_tokens,
        mean_acceptance_length=1 + counts.num_accepted_tokens / counts.num_drafts,
    )


def request_metrics(
    times: RequestTimes, num_tokens: int, counts: DraftCounts | None
) -> RequestMetrics:
    """Of a sequence that has ended with `num_tokens` generated ones."""
    started, first = times.first_scheduled, times.first_token
    generation_ms = None if first is None else 1e3 * (times.finished - first)
    running_s = 0.0 if started is None else times.finished - started
    return RequestMetrics(
        time_to_first_token_ms=None if first is None else 1e3 * (first - times.arrival),
        generation_time_ms=generation_ms,
        queue_time_ms=None if started is None else 1e3 * (started - times.arrival),
        mean_itl_ms=None
        if generation_ms is None or num_tokens < 2
        else generation_ms / (num_tokens - 1),
        tokens_per_second=num_tokens / running_s if running_s > 0 else None,
        speculative_decoding=spec_decode_metrics(counts),
    )
