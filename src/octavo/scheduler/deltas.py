"""What is told of a sequence."""

from __future__ import annotations

from octavo.core.step import RequestTimes, SequenceOutput, TokenDelta
from octavo.scheduler.sequence import Sequence


def news(sequence: Sequence, result: SequenceOutput, num_tokens: int) -> TokenDelta:
    """The first `num_tokens` that a step gave it, which it has taken; and once, what is known of
    its prompt.
    """
    logprobs = result.logprobs
    if logprobs is not None:
        logprobs = logprobs[:num_tokens]
    delta = TokenDelta(
        sequence.request.request_id,
        sequence.index,
        result.token_ids[:num_tokens],
        logprobs,
        None,  # reason
        None,  # stop token
        sequence.num_cached_tokens,
    )
    if sequence.prompt_logprobs is not None:
        delta = delta._replace(prompt_logprobs=tuple(sequence.prompt_logprobs))
        sequence.prompt_logprobs = None
    return delta


def final_delta(sequence: Sequence, now: float, error: str | None) -> TokenDelta:
    """That it has ended, for its `finish_reason`. Has no tokens."""
    request = sequence.request
    times = RequestTimes(
        request.arrival_time, sequence.first_scheduled_time, sequence.first_token_time, now
    )
    return TokenDelta(
        request.request_id,
        sequence.index,
        (),
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        times=times,
        error=error,
        drafts=None if sequence.drafts is None else sequence.drafts.counts(),
    )
