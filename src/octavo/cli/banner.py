"""What `octavo serve` prints when it is ready."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol

import octavo


class Decision(Protocol):
    """Something that was decided automatically."""

    @property
    def what(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def reason(self) -> str: ...


def banner(
    url: str, model: str, decisions: Iterable[Decision], has_chat_template: bool, needs_key: bool
) -> str:
    """The URL, the model, each decision with its reason, and a line to paste.

    model: the name by which clients ask for it.
    """
    rows = [(d.what, d.value, d.reason) for d in decisions]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    lines = [f"Octavo {octavo.__version__} serves {model} at {url}/v1", ""]
    lines += [f"  {what:{widths[0]}}  {value:{widths[1]}}  {why}" for what, value, why in rows]
    lines += ["", "Try it:", f"  {curl_line(url, model, has_chat_template, needs_key)}"]
    return "\n".join(lines)


def curl_line(url: str, model: str, has_chat_template: bool, needs_key: bool) -> str:
    """A first request, for a shell."""
    question = "What is an octavo?"
    if has_chat_template:
        path = "chat/completions"
        body = {"model": model, "messages": [{"role": "user", "content": question}]}
    else:
        path, body = "completions", {"model": model, "prompt": question}
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if needs_key else ""
    text = json.dumps(body).replace("'", r"'\''")
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{text}'"
