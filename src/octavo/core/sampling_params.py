"""What a request may ask of the sampler, with vLLM's names, defaults and limits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
# Token ids in a list or map: more than the vocabulary of any model at hand.
MAX_TOKEN_IDS = 300_000
MAX_TOKENS = 2**31 - 1
# Below this temperature the distribution is a point for any logits a model produces: treated as
# greedy. Above it logits / temperature stays finite in float32.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Raises RequestError with `param` set to the field's name for a value out of range.

    n: continuations of the one prompt, each with its own random stream.
    presence_penalty, frequency_penalty: subtracted from the logit of each token generated so far
        (once; per occurrence), in [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
        output, in [0.001, 1000].
    temperature: 0 is greedy; otherwise in (0, 2].
    top_p, top_k, min_p: keep the smallest set of tokens with this mass; the k likeliest (0 or -1:
        all); those with at least this share of the likeliest token's probability.
    seed: makes the request's tokens reproducible, whatever shares its batch. -1 is None.
    stop, stop_token_ids: strings and tokens that end the text, once more than `min_tokens` tokens
        have been generated.
    min_tokens: end-of-sequence tokens can't be sampled before this many tokens.
    ignore_eos: go on past end-of-sequence tokens.
    logprobs: log-probabilities of this many likeliest tokens per position (0: only the sampled
        one's), taken from the unmodified distribution; -1 means the whole vocabulary.
        prompt_logprobs: the same for the prompt's tokens.
    bad_words: texts that may not appear. allowed_token_ids: the only tokens that may.
        logit_bias: token id to what is added to its logit, in [-100, 100].
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Collection[int] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__  # normalise the spellings of "off" once, here
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        put(self, "stop", tuple(dict.fromkeys(self.stop or ())))
        put(self, "bad_words", tuple(dict.fromkeys(self.bad_words or ())))
        put(self, "logit_bias", dict(self.logit_bias or {}))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            put(self, "allowed_token_ids", allowed)
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.seed == -1:
            put(self, "seed", None)
        self._check_numbers()
        self._check_lists()
        if self.temperature < GREEDY_TEMPERATURE:
            put(self, "temperature", 0.0)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, low=0, high=2)
        _number("top_p", self.top_p, low=0, high=1, open_low=True)
        _number("min_p", self.min_p, low=0, high=1)
        _number("presence_penalty", self.presence_penalty, low=-2, high=2)
        _number("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        _number("repetition_penalty", self.repetition_penalty, low=0.001, high=1000)
        _integer("n", self.n, low=1, high=MAX_N)
        limits = "an integer of at least 1, or 0 or -1 for all"
        _integer("top_k", self.top_k, low=0, high=2**31 - 1, allowed=limits)
        _integer("min_tokens", self.min_tokens, low=0, high=MAX_TOKENS)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1, high=MAX_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise _bad("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, low=-1, high=2**31 - 1)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _bad("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise _bad("stop", text, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise _bad("bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                raise _bad("bad_words", word, f"strings of 1 to {MAX_BAD_WORD_CHARS} characters")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _bad("allowed_token_ids", [], "at least one token id (or leave it out)")
        if len(self.logit_bias) > MAX_TOKEN_IDS:
            raise _bad("logit_bias", f"{len(self.logit_bias)} ids", f"at most {MAX_TOKEN_IDS} ids")
        for token, bias in self.logit_bias.items():
            _number(f"logit_bias[{token}]", bias, low=-100, high=100, param="logit_bias")

    def check_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Check everything that names token ids, or their number, against the model.

        vocab_size: ids 0..vocab_size-1 exist. max_logprobs: the server's limit for `logprobs` (-1:
        none).
        """
        for param, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise _bad(param, token, f"token ids from 0 to {vocab_size - 1}")
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            limit = vocab_size if max_logprobs == -1 else max_logprobs
            if value is None or (value == -1 and max_logprobs == -1) or 0 <= value <= limit:
                continue
            raise _bad(param, value, f"in [0, {limit}] (the server's --max-logprobs)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_output_history(self) -> bool:
        """Whether choosing a token needs the counts of the tokens before it."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _token_ids(param: str, ids: Collection[Any]) -> frozenset[int]:
    if len(ids) > MAX_TOKEN_IDS:
        raise _bad(param, f"{len(ids)} ids", f"at most {MAX_TOKEN_IDS} token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise _bad(param, token, "integer token ids")
    return frozenset(ids)


def _bad(param: str, value: Any, allowed: str) -> RequestError:
    shown = repr(value)
    if len(shown) > 200:
        shown = shown[:200] + "..."
    return RequestError(
        f"{param} must be {allowed}, got {shown} (parameter={param}, value={shown})", param=param
    )


def _number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    param: str | None = None,
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    above = is_number and (value > low if open_low else value >= low)
    if above and value <= high and math.isfinite(value):
        return
    bracket = "(" if open_low else "["
    limit = f"a finite number above {low}" if high == math.inf else f"in {bracket}{low}, {high}]"
    error = _bad(name, value, limit)
    error.param = param or name
    raise error


def _integer(name: str, value: Any, *, low: int, high: int, allowed: str | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not (is_integer and low <= value <= high):
        raise _bad(name, value, allowed or f"an integer in [{low}, {high}]")
