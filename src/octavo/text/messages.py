"""Chat messages as a template wants them: checked, content parts joined or listed, tool arguments
parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import nodes

from octavo.core import strict_json
from octavo.core.errors import RequestError

ContentFormat = Literal["auto", "string", "openai"]


@dataclass(frozen=True)
class ContentShape:
    """What a template expects in message["content"]."""

    takes_parts: bool
    """A list of {"type": "text", "text": …}; otherwise one string."""
    takes_strings: bool
    """Besides a list of parts, a string: the template tests for it."""

    @classmethod
    def of(cls, template: nodes.Template, content_format: ContentFormat) -> ContentShape:
        """ "auto": a template that loops over a message's content takes parts."""
        takes_strings = any(test.name == "string" for test in template.find_all(nodes.Test))
        if content_format == "auto":
            return cls(_loops_over_content(template), takes_strings)
        return cls(content_format == "openai", takes_strings)


def _loops_over_content(template: nodes.Template) -> bool:
    names: set[str] = set()

    def is_content(node: nodes.Node | None) -> bool:
        match node:
            case nodes.Getattr(attr="content"):
                return True
            case nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name):
                return name in names
            case nodes.Filter(node=inner):
                return is_content(inner)
        return False

    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = macros[call.node.name].args
            names.update(
                p.name for p, arg in zip(parameters, call.args, strict=False) if is_content(arg)
            )
    return any(is_content(loop.iter) for loop in template.find_all(nodes.For))


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], shape: ContentShape
) -> list[dict[str, Any]]:
    """Copies of the messages in the template's shape. Raises RequestError (param messages)."""
    if not messages:
        raise RequestError("`messages` is empty; send at least one message.", param="messages")
    return [_prepare(message, f"messages[{i}]", shape) for i, message in enumerate(messages)]


def _prepare(message: Mapping[str, Any], where: str, shape: ContentShape) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} must be an object, got {type(message).__name__}.", param="messages"
        )
    # Templates ask whether a field is there, and schemas leave unset fields as None.
    prepared = {k: v for k, v in message.items() if v is not None or k == "content"}
    content = prepared.get("content")
    if isinstance(content, list | tuple):
        texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        prepared["content"] = _parts(texts) if shape.takes_parts else "\n".join(texts)
    elif isinstance(content, str):
        if shape.takes_parts and not shape.takes_strings:
            prepared["content"] = _parts([content])
    elif content is not None:
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, got "
            f"{type(content).__name__}.",
            param="messages",
        )
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [
            _with_parsed_arguments(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(prepared["tool_calls"])
        ]
    return prepared


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(
            f"{where} must be a text part, got {type(part).__name__}.", param="messages"
        )
    if part.get("type") != "text":
        raise RequestError(
            f"{where} has type {part.get('type')!r:.100}; this model takes only parts of type "
            "'text'.",
            param="messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string.", param="messages")
    return text


def _with_parsed_arguments(call: object, where: str) -> object:
    """OpenAI's clients send arguments as a JSON string; templates are written for the object."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = strict_json.loads(arguments or "{}")
    except ValueError as error:
        raise RequestError(
            f"{where}.function.arguments is not JSON ({error}).", param="messages"
        ) from None
    return {**call, "function": {**function, "arguments": parsed}}
