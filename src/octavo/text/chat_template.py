"""Chat messages to a prompt, through the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from octavo.core.errors import ConfigError, RequestError
from octavo.text.control_text import ControlTextGuard, unused_noncharacters
from octavo.text.messages import ContentFormat, ContentShape, prepare_messages
from octavo.text.template_meter import metered
from octavo.text.template_sandbox import TemplateEnvironment
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.weights import TextAssets

_MAX_TEMPLATE_BYTES = 1 << 20
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What a template can raise with odd input; anything else is a bug of ours.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,  # how jinja's filters check their arguments
    RecursionError,
)
_MAX_FAULT_CHARS = 1000


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@dataclass(frozen=True)
class _Compiled:
    source: str
    template: jinja2.Template
    shape: ContentShape

    @classmethod
    def of(cls, source: str, content_format: ContentFormat) -> _Compiled:
        environment = _environment()
        if len(source) > _MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"The chat template has {len(source)} characters; at most {_MAX_TEMPLATE_BYTES} "
                "are allowed."
            )
        try:
            shape = ContentShape.of(environment.parse_unmetered(source), content_format)
            return cls(source, environment.from_string(source), shape)
        except (jinja2.TemplateError, RecursionError) as error:
            said = str(error)
            if isinstance(error, jinja2.TemplateSyntaxError):
                said = f"line {error.lineno}: {error.message}"
            raise ConfigError(
                f"The chat template can't be read ({said}); correct it or pass another with "
                "--chat-template FILE."
            ) from error


class ChatTemplate:
    """One model's chat template and its tokenizer. Immutable: threads may share it."""

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        *,
        tool_use_source: str | None = None,
        content_format: ContentFormat = "auto",
    ) -> None:
        """`source`: None for a model without a template, for which every chat is a RequestError.

        `tool_use_source`: used instead of `source` when a request has tools. `content_format`:
        whether the template takes message content as "string" or as a list of parts ("openai");
        "auto" reads that off the template. Raises ConfigError for a template with wrong syntax.
        """
        self._tokenizer = tokenizer
        self._guard = ControlTextGuard(tokenizer)
        self._default = None if source is None else _Compiled.of(source, content_format)
        self._tool_use = (
            self._default
            if tool_use_source is None
            else _Compiled.of(tool_use_source, content_format)
        )

    @classmethod
    def from_assets(
        cls,
        assets: TextAssets,
        tokenizer: Tokenizer,
        *,
        override: str | None = None,
        content_format: ContentFormat = "auto",
    ) -> ChatTemplate:
        """The model's template, or `override` (from `load_template`) in its place."""
        if override is not None:
            return cls(override, tokenizer, content_format=content_format)
        named = _named_templates(assets)
        return cls(
            named.get("default"),
            tokenizer,
            tool_use_source=named.get("tool_use"),
            content_format=content_format,
        )

    @property
    def exists(self) -> bool:
        """False: the model came without a template and none was given."""
        return self._default is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        `continue_final_message`: the last message, an assistant's, is left open: the prompt ends
        exactly in its text. `extra`: further variables of the template (chat_template_kwargs).
        Raises RequestError: no template, no messages, a content part that is not text, or what the
        template itself says.
        """
        text, _ = self._render(
            messages,
            tools,
            documents,
            add_generation_prompt,
            continue_final_message,
            extra,
            guarded=False,
        )
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        escape_control_tokens: bool = True,
    ) -> list[int]:
        """The prompt's token ids: `render`, then the tokenizer.

        `escape_control_tokens`: control-token text in the request's strings stays ordinary text,
        only the template's own counts; without such text the ids are those of the rendered string.
        `add_special_tokens`: off, because templates write their BOS themselves.
        """
        text, guard = self._render(
            messages,
            tools,
            documents,
            add_generation_prompt,
            continue_final_message,
            extra,
            guarded=escape_control_tokens,
        )
        if guard in text:
            return self._tokenizer.encode_guarded(
                text, guard, add_special_tokens=add_special_tokens
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def continued_text(self, message: Mapping[str, Any], *, has_tools: bool = False) -> str:
        """The text of `message` in the prompt, which `continue_final_message` leaves open.

        Parts that the template gets one by one are taken to follow one another.
        """
        [prepared] = prepare_messages([message], self._compiled(has_tools).shape)
        content = prepared.get("content") or ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def _compiled(self, has_tools: bool) -> _Compiled:
        compiled = self._tool_use if has_tools else self._default
        if compiled is None:
            raise RequestError(
                "This model has no chat template, so it can't take chat messages; start the server "
                "with `--chat-template FILE` to give it one, or use /v1/completions."
            )
        return compiled

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any] | None,
        *,
        guarded: bool,
    ) -> tuple[str, str]:
        """(rendered text, the guard character that marks control text of the request in it)."""
        compiled = self._compiled(bool(tools))
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "`continue_final_message` and `add_generation_prompt` exclude each other; set the "
                "latter to false.",
                param="continue_final_message",
            )
        variables: dict[str, Any] = dict(extra or {})
        if taken := _OWN_VARIABLES & variables.keys():
            raise RequestError(
                f"`chat_template_kwargs` may not set {min(taken)!r}; use the request field of that "
                "name.",
                param="chat_template_kwargs",
            )
        variables |= {
            "messages": prepare_messages(messages, compiled.shape),
            "tools": tools,
            "documents": documents,
        }
        guard, mark = unused_noncharacters([variables, compiled.source], 2)
        try:
            if guarded:
                variables = self._guard.guarded(variables, guard)
            if continue_final_message:
                _mark_final_message(variables["messages"][-1], mark)
            variables = {**self._tokenizer.named_tokens, **variables}
            with metered():
                text = compiled.template.render(
                    variables, add_generation_prompt=add_generation_prompt
                )
        except _TEMPLATE_FAULTS as error:
            said = str(error)[:_MAX_FAULT_CHARS].replace(guard, "").replace(mark, "")
            raise RequestError(
                f"The chat template refused the request: {said}", param="messages"
            ) from error
        if continue_final_message:
            text, found, _ = text.rpartition(mark)
            if not found:
                raise RequestError(
                    "The chat template leaves out the text of the final message, so it can't be "
                    "continued.",
                    param="continue_final_message",
                )
        return text, guard


def _named_templates(assets: TextAssets) -> dict[str, str]:
    """Name -> template, "default" being the usual one: tokenizer_config.json has one or a list."""
    found: Any = assets.tokenizer_config.get("chat_template")
    if isinstance(found, list):
        entries = [entry if isinstance(entry, Mapping) else {} for entry in found]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    else:
        tool_use = (assets.gguf or {}).get("tokenizer.chat_template.tool_use")
        named = {"default": found, "tool_use": tool_use}
    templates: dict[str, str] = {}
    for name, source in named.items():
        if isinstance(name, str) and isinstance(source, str):
            templates[name] = source
        elif source is not None:
            raise ConfigError(
                f"chat_template in tokenizer_config.json is malformed (entry {name!r}); pass a "
                "template with --chat-template FILE."
            )
    return templates


def _mark_final_message(message: dict[str, Any], mark: str) -> None:
    """Appends `mark` to the message's text: what the template writes behind it closes the turn."""
    content = message.get("content")
    parts = [] if isinstance(content, str) else list(content or ())
    text = parts[-1]["text"] if parts else content
    if message.get("role") != "assistant" or not text:
        raise RequestError(
            "`continue_final_message` needs an assistant message with text at the end of "
            f"`messages`; the last one is from {message.get('role')!r}.",
            param="continue_final_message",
        )
    message["content"] = [*parts[:-1], {**parts[-1], "text": text + mark}] if parts else text + mark


def load_template(path_or_inline: str) -> str:
    """The text of --chat-template: a file's, or the argument where it is a template itself.

    Raises ConfigError for a file that can't be read.
    """
    if "{{" in path_or_inline or "{%" in path_or_inline:
        return path_or_inline
    path = Path(path_or_inline)
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat-template {path} is larger than {_MAX_TEMPLATE_BYTES} bytes.")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {path_or_inline!r} can't be read ({error}); give a file or a jinja "
            "template."
        ) from error
