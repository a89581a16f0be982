"""logit_bias, allowed_token_ids and bad_words, from a request to the tokens of a real model."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from support.serve_command import ServeProcess

FIRST, SECOND = 40, 50  # two letters' tokens


@pytest.fixture(scope="module")
def text_of(server: ServeProcess) -> Callable[[list[int]], str]:
    def detokenize(ids: list[int]) -> str:
        reply = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}, timeout=10)
        return str(reply.json()["prompt"])

    return detokenize


def said(server: ServeProcess, **fields: object) -> str:
    reply = server.completion(temperature=0, max_tokens=4, ignore_eos=True, **fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_logit_bias(server: ServeProcess, text_of: Callable[[list[int]], str]) -> None:
    for token in (FIRST, SECOND):
        assert said(server, logit_bias={str(token): 100}) == text_of([token] * 4)
    unbiased = said(server)
    assert said(server, logit_bias={str(FIRST): 0}) == unbiased != text_of([FIRST] * 4)


def test_allowed_token_ids(server: ServeProcess, text_of: Callable[[list[int]], str]) -> None:
    assert said(server, allowed_token_ids=[SECOND]) == text_of([SECOND] * 4)
    both = said(server, allowed_token_ids=[FIRST, SECOND])
    assert set(both) <= set(text_of([FIRST, SECOND]))


def test_bad_words(server: ServeProcess, text_of: Callable[[list[int]], str]) -> None:
    allowed = [FIRST, SECOND]
    for bad, other in ((FIRST, SECOND), (SECOND, FIRST)):
        text = said(server, allowed_token_ids=allowed, bad_words=[text_of([bad])])
        assert text == text_of([other] * 4)
