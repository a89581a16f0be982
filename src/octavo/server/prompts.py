"""From what a request says to the token ids that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from octavo.core.errors import RequestError
from octavo.server.errors import shown
from octavo.server.schemas import ChatFields
from octavo.text.served_model import ServedModel

MAX_PROMPTS = 1024


class Prompt(NamedTuple):
    """text: as the client gave it; None for token ids."""

    token_ids: Sequence[int]
    text: str | None = None


class PromptEncoder:
    """Tokenizes for one model. No state that changes: any number of threads may use it."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def completions(self, value: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """The forms of `prompt`: a text, token ids, or a list of either. Raises RequestError."""
        items = value if _is_list_of_prompts(value) else [value]
        if not 0 < len(items) <= MAX_PROMPTS:
            raise _bad_prompt(f"has {len(items)} entries; send 1 to {MAX_PROMPTS}")
        return [self._prompt(item, add_special_tokens) for item in items]

    def text(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids; a text that can't fit is refused before any work. Raises RequestError."""
        self._check_chars(len(text), "prompt")
        return self._model.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    def chat(
        self, messages: Sequence[dict[str, Any]], fields: ChatFields, *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a conversation. Raises RequestError."""
        self._check_chars(sum(map(_num_chars, messages)), "messages")
        add_generation_prompt = fields.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not fields.continue_final_message
        return self._model.chat_template.encode_chat(
            messages,
            tools=fields.tools,
            documents=fields.documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            extra=fields.chat_template_kwargs,
            add_special_tokens=add_special_tokens,
        )

    def _prompt(self, item: Any, add_special_tokens: bool) -> Prompt:
        if isinstance(item, str):
            return Prompt(self.text(item, add_special_tokens=add_special_tokens), item)
        if _is_token_ids(item):
            return Prompt(item)
        raise _bad_prompt(
            "must be a text, a list of integer token ids, or a list of either, "
            f"got {shown(item)} (parameter=prompt)"
        )

    @cached_property
    def _longest_token(self) -> int:
        """In bytes: no text has fewer tokens than its bytes over these."""
        tokenizer = self._model.tokenizer
        lengths = (len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        return max(lengths, default=1)

    def _check_chars(self, num_chars: int, param: str) -> None:
        limit = self._model.max_model_len
        if num_chars <= limit:  # true of nearly all: spares a start the walk over the vocabulary
            return
        at_least = num_chars // self._longest_token
        if at_least > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt has "
                f"{num_chars} characters, which are at least {at_least} tokens. Please reduce the "
                "length of the input prompt.",
                param=param,
            )


def _num_chars(message: dict[str, Any]) -> int:
    """Of a message's text, which may come in parts; anything else is the template's to refuse."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def _is_list_of_prompts(value: Any) -> bool:
    return isinstance(value, list) and not (value and type(value[0]) is int)


def _is_token_ids(value: Any) -> bool:
    # By exact type, because True is an int; by set, because prompts are long.
    return isinstance(value, list) and set(map(type, value)) == {int}


def _bad_prompt(what: str) -> RequestError:
    return RequestError(f"prompt {what}", param="prompt")
