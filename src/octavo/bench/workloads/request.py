"""A request before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Prompt = tuple[int, ...] | str | tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """prompt: token ids, or text, or the messages of a chat. prompt_len: its tokens as planned,
    with what the tokenizer adds (BOS); in a chat, without what the template adds. max_tokens: of
    output; is_forced: exactly so many, whatever the model would say. arrival_s: after the start of
    the load point; None in a closed loop, where the next request is sent when a user becomes free.
    shared_len: tokens at its start that requests before it in the same list have too, so that a
    prefix cache may know them. clipped_len: tokens of prompt and output that were taken away for it
    to fit the model's context.
    """

    index: int
    class_name: str
    prompt: Prompt
    prompt_len: int
    max_tokens: int
    is_forced: bool = True
    arrival_s: float | None = None
    shared_len: int = 0
    clipped_len: int = 0


def clipped_to_fit(
    prompt_len: int, output_len: int, max_model_len: int | None, *, least_prompt_len: int = 1
) -> tuple[int, int]:
    """Both lengths, made smaller in their proportion until they fit the context together."""
    if max_model_len is None or prompt_len + output_len <= max_model_len:
        return prompt_len, output_len
    share = max_model_len / (prompt_len + output_len)
    prompt_len = min(max(int(prompt_len * share), least_prompt_len), max_model_len - 1)
    return prompt_len, max_model_len - prompt_len


def clipping(requests: Sequence[PlannedRequest]) -> str | None:
    """What was taken away to fit the context, in a sentence; None if nothing was."""
    clipped = [request for request in requests if request.clipped_len]
    if not clipped:
        return None
    taken = sum(request.clipped_len for request in clipped)
    planned = taken + sum(request.prompt_len + request.max_tokens for request in requests)
    return (
        f"{len(clipped)} of {len(requests)} requests were shortened to fit the context, "
        f"by {100 * taken / planned:.1f} % of all tokens; a smaller --scale keeps their shape"
    )
