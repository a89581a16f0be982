"""The model as its users see it: names, text, limits, defaults; makes requests of prompts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.core.errors import RequestError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """names: what clients may call it, the first is reported. root: the model as it was given.

    vocab_size: token ids below it may appear in prompts and outputs. default_sampling:
    SamplingParams fields that apply where a request is silent. eos_token_ids: tokens that end an
    answer. fingerprint: identifies weights and configuration in replies. created: Unix seconds.
    """

    names: tuple[str, ...]
    root: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    fingerprint: str = ""
    created: int = 0
    draw_seed: Callable[[], int] = field(default=partial(secrets.randbits, 63))

    @property
    def name(self) -> str:
        return self.names[0]

    def request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        **options: Any,
    ) -> Request:
        """One request; see `requests`."""
        return self.requests([(request_id, prompt_token_ids)], sampling, **options)[0]

    def requests(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        clamp_max_tokens: bool = False,
    ) -> list[Request]:
        """A checked request for each (request id, prompt's token ids), all with the same sampling.

        max_tokens None means all the room that the context leaves; a larger number than that is an
        error, or is lowered to it under `clamp_max_tokens`. Raises RequestError.
        """
        sampling.check_vocabulary(self.vocab_size, self.max_logprobs)
        bad_words_ids = self._bad_words_ids(sampling)
        for _, token_ids in prompts:
            self.check_prompt(token_ids)
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(token_ids),
                sampling=sampling,
                max_tokens=self._max_tokens(sampling, len(token_ids), clamp_max_tokens),
                seed=self.draw_seed() if sampling.seed is None else sampling.seed,
                eos_token_ids=frozenset() if sampling.ignore_eos else self.eos_token_ids,
                bad_words_ids=bad_words_ids,
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=cache_salt,
            )
            for request_id, token_ids in prompts
        ]

    def _max_tokens(self, sampling: SamplingParams, num_prompt: int, clamp: bool) -> int:
        limit = self.max_model_len
        room = limit - num_prompt
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room and not clamp:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {num_prompt} input tokens, "
                f"a total of {num_prompt + max_tokens}. Please reduce max_tokens to at most {room} "
                "or shorten the prompt.",
                param="max_tokens",
            )
        max_tokens = min(max_tokens, room)
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens must be at most the {max_tokens} tokens that may be generated here, "
                f"got {sampling.min_tokens}",
                param="min_tokens",
            )
        return max_tokens

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises RequestError if it is empty, too long, or has ids that the model lacks."""
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one", param="prompt")
        if len(token_ids) >= self.max_model_len:
            excess = "exceeds this limit even without any output tokens"
            if len(token_ids) == self.max_model_len:
                excess = "leaves no room for output tokens"
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt contains {len(token_ids)} input tokens, which {excess}. "
                "Please reduce the length of the input prompt.",
                param="prompt",
            )
        if max(token_ids) >= self.vocab_size or min(token_ids) < 0:
            bad = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise RequestError(
                f"prompt has token id {bad}; this model has ids 0 to {self.vocab_size - 1}",
                param="prompt",
            )

    def _bad_words_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as it is spelled at the start of a text and after a space."""
        spelled: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if not ids:
                    raise RequestError(
                        f"bad_words has {word!r}, which has no tokens; leave it out",
                        param="bad_words",
                    )
                spelled[tuple(ids)] = None
        return tuple(spelled)
