"""Which requests are refused when they arrive, because they could never run."""

from __future__ import annotations

from octavo.core.errors import RequestError
from octavo.core.request import Request
from octavo.scheduler.policies import Policy
from octavo.scheduler.residency import Residency


class Limits:
    """max_model_len: longest prompt plus output, in tokens."""

    def __init__(self, policy: Policy, residency: Residency, max_model_len: int) -> None:
        self._policy = policy
        self._residency = residency
        self._max_model_len = max_model_len

    def check(self, request: Request) -> None:
        """Raises RequestError, with the numbers and a remedy."""
        if request.priority and not self._policy.uses_priority:
            raise RequestError(
                f"priority {request.priority} has no effect under the {self._policy.name} policy; "
                "leave it out, or start the server with --scheduling-policy priority",
                param="priority",
            )
        num_prompt, longest = (
            request.num_prompt_tokens,
            request.num_prompt_tokens + request.max_tokens,
        )
        wanted = f"prompt ({num_prompt} tokens) and output (up to {request.max_tokens})"
        if longest > self._max_model_len:
            raise RequestError(
                f"{wanted} exceed the model's length of {self._max_model_len} tokens; lower "
                "max_tokens or shorten the prompt",
                param="max_tokens",
            )
        needed, there_are = self._residency.blocks_for(longest), self._residency.pool.num_blocks
        if needed > there_are:
            raise RequestError(
                f"{wanted} need {needed} KV blocks of {self._residency.block_size} tokens; there "
                f"are {there_are}. Lower max_tokens, or give the server more KV "
                "memory (--kv-cache-memory-bytes).",
                param="max_tokens",
            )
