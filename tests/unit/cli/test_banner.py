"""The banner's line can be pasted."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

import pytest

from octavo.cli.banner import banner, curl_line


class Decision(NamedTuple):
    what: str
    value: str
    reason: str


def test_the_banner_says_where_what_and_why() -> None:
    decisions = [Decision("dtype", "float32", "as stored"), Decision("KV cache", "1 GiB", "free")]
    text = banner("http://127.0.0.1:8000", "tiny", decisions, True, False)
    assert "serves tiny at http://127.0.0.1:8000/v1" in text
    assert "  dtype     float32  as stored" in text
    assert "  KV cache  1 GiB    free" in text


def test_a_banner_without_decisions_still_has_the_line() -> None:
    text = banner("http://h:1", "tiny", [], has_chat_template=True, needs_key=False)
    assert "curl http://h:1/v1/chat/completions" in text


@pytest.mark.parametrize("name", ["tiny", "it's", 'a "b"', "$HOME"])
def test_the_line_survives_a_shell(name: str) -> None:
    words = shlex.split(curl_line("http://h:1", name, has_chat_template=True, needs_key=True))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert words[words.index("-H") + 1] == "Content-Type: application/json"
    assert "Authorization: Bearer $OCTAVO_API_KEY" in words
    body = json.loads(words[-1])
    assert body["model"] == name
    assert body["messages"][0]["role"] == "user"


def test_a_model_without_a_template_completes() -> None:
    words = shlex.split(curl_line("http://h:1", "base", has_chat_template=False, needs_key=False))
    assert words[1] == "http://h:1/v1/completions"
    assert json.loads(words[-1])["prompt"]
