"""What the target is asked, so that its answers can be learned from."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError

Conversation = Sequence[Mapping[str, Any]]
"""Messages, as chats have them."""

_LIST = re.compile(r"(\w+) = (.*)")
_SLOT = re.compile(r"\{(\w+)\}")
_FORMS = 'one prompt a line, or JSON lines with "prompt" (a text) or "messages" (a list)'


def read_conversations(path: Path) -> list[Conversation]:
    """The prompts of a file: one a line, or a JSON object a line. Raises ConfigError that names the
    line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the prompts {path} can't be read ({error}); --prompts takes {_FORMS}"
        ) from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    conversations = [
        _from_json(line, f"{path}, line {number}") if line.startswith("{") else _asked(line)
        for number, line in lines
        if line
    ]
    if len(conversations) < 2:
        raise ConfigError(
            f"{path} has {len(conversations)} prompts, and at least 2 are needed, one of them to "
            f"measure with; it takes {_FORMS}"
        )
    return conversations


def _from_json(line: str, where: str) -> Conversation:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is broken JSON ({error}); a file has {_FORMS}") from error
    if isinstance(prompt := record.get("prompt"), str) and prompt:
        return _asked(prompt)
    messages = record.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return messages
    raise ConfigError(f'{where} has neither a "prompt" nor "messages"; a file has {_FORMS}')


def built_in_conversations(rng: random.Random) -> Iterator[Conversation]:
    """Those of prompts.txt: each of its lines, with random items for what it leaves open, in random
    order; then each again with others, until nothing new comes of it. None comes twice.
    """
    text = resources.files(__package__).joinpath("prompts.txt").read_text(encoding="utf-8")
    lists: dict[str, list[str]] = {}
    templates = []
    for line in text.splitlines():
        if match := _LIST.fullmatch(line):
            lists[match[1]] = match[2].split(" | ")
        elif line and not line.startswith("#"):
            templates.append(line)

    def filled(template: str) -> str:
        return _SLOT.sub(lambda slot: filled(rng.choice(lists[slot[1]])), template)

    seen: set[str] = set()
    num_seen = -1
    while len(seen) > num_seen:
        num_seen = len(seen)
        for prompt in map(filled, rng.sample(templates, len(templates))):
            if prompt not in seen:
                seen.add(prompt)
                yield _asked(prompt)


def _asked(prompt: str) -> Conversation:
    return [{"role": "user", "content": prompt}]
