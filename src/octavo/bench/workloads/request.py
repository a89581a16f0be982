"""A request before it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """prompt: token ids, or text, or the messages of a chat. prompt_len: its tokens as planned; in
    a chat, without what the template adds. max_tokens: of output; is_forced: exactly so many,
    whatever the model would say. arrival_s: after the start of the load point; None in a closed
    loop, where the next request is sent when a user becomes free.
    """

    index: int
    class_name: str
    prompt: tuple[int, ...] | str | tuple[Message, ...]
    prompt_len: int
    max_tokens: int
    is_forced: bool = True
    arrival_s: float | None = None
