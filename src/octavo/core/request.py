"""A request as the engine knows it: token ids and limits, no text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from octavo.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it, `sampling.n` times.

    prompt_token_ids: at least one id, all below the model's vocabulary size.
    max_tokens: tokens to generate at most per sequence; prompt + max_tokens never exceeds the
    model's length.
    eos_token_ids: tokens that end a sequence; empty under `ignore_eos`.
    bad_words_ids: token sequences that may not be completed.
    seed: of the request's random streams (drawn by the client where the user gave none).
    priority: lower is served first under the priority policy.
    arrival_time: seconds on the engine's clock.
    cache_salt: only requests with the same salt share cached prefixes.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
