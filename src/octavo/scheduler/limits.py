"""What is refused: requests that could never run, and limits that a server wasn't started for."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.errors import RequestError
from octavo.core.request import Request
from octavo.core.step import LiveLimits
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


class LimitRange(NamedTuple):
    """Of limits that change while a server runs. most_seqs, most_tokens: those of the start, for
    which memory was planned. fewest_tokens: of a step, so that every prompt can be computed.
    """

    most_seqs: int
    most_tokens: int
    fewest_tokens: int

    def checked(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None, *, num_running: int
    ) -> LiveLimits:
        """What is asked for; None: as at the start. Raises RequestError for what can't be."""
        budget = max_num_batched_tokens or self.most_tokens
        wanted = min(max_num_seqs or self.most_seqs, budget)
        if max_num_seqs is not None and max_num_seqs > self.most_seqs:
            raise RequestError(
                f"max_num_seqs {max_num_seqs} is more than the {self.most_seqs} that the server "
                "was started for; start it with more",
                param="max_num_seqs",
            )
        if budget > self.most_tokens:
            raise RequestError(
                f"max_num_batched_tokens {budget} is more than the {self.most_tokens} that the "
                "server was started for; start it with more",
                param="max_num_batched_tokens",
            )
        if budget < self.fewest_tokens:
            raise RequestError(
                f"max_num_batched_tokens {budget} is less than the {self.fewest_tokens} tokens of "
                "the longest prompt, and chunked prefill is off",
                param="max_num_batched_tokens",
            )
        if num_running > wanted:
            raise RequestError(
                f"{num_running} sequences run, and no more than {wanted} would be allowed; try "
                "again when fewer do",
                status=409,
            )
        return LiveLimits(wanted, budget)
