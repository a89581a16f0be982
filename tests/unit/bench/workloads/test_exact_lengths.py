"""BEN-11: prompts are as long as they say, as the server counts them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.bench.load.target import Target
from octavo.bench.workloads.prompts import Api
from octavo.bench.workloads.request import PlannedRequest
from octavo.bench.workloads.tokenizing import vocabulary_of
from octavo.bench.workloads.workload import Workload
from octavo.text.served_model import ServedModel
from support.scripted import ScriptedExecutor, ScriptedServer, always, scripted_server

FIXED = Workload.of_lengths(64, 1)


@pytest.fixture
def server(model: ServedModel) -> Iterator[ScriptedServer]:
    with scripted_server(ScriptedExecutor(always([97])), model) as running:
        yield running


def planned(
    server: ScriptedServer, api: Api, *, takes_token_ids: bool = True
) -> list[PlannedRequest]:
    target = Target(base_url=f"{server.url}/v1", model="scripted", api=api)
    vocabulary = vocabulary_of(target)
    return FIXED.requests(
        seed=1, count=50, vocabulary=vocabulary, api=api, takes_token_ids=takes_token_ids
    )


def prompt_tokens(server: ScriptedServer, request: PlannedRequest) -> int:
    if isinstance(request.prompt, tuple) and isinstance(request.prompt[0], dict):
        reply = server.chat(messages=list(request.prompt), max_tokens=1)
    else:
        reply = server.complete(prompt=request.prompt, max_tokens=1)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize("takes_token_ids", [True, False])
def test_completions_have_exactly_64_prompt_tokens(
    server: ScriptedServer, takes_token_ids: bool
) -> None:
    """BOS is one of them, where the tokenizer adds it."""
    requests = planned(server, "completions", takes_token_ids=takes_token_ids)
    assert all(isinstance(r.prompt, tuple) == takes_token_ids for r in requests)
    assert {r.prompt_len for r in requests} == {64}
    assert {prompt_tokens(server, r) for r in requests} == {64}
    assert len({r.prompt for r in requests}) == 50
    assert planned(server, "completions", takes_token_ids=takes_token_ids) == requests


def test_a_chat_has_64_and_what_the_template_adds_which_is_known(server: ScriptedServer) -> None:
    target = Target(base_url=f"{server.url}/v1", model="scripted", api="chat")
    overhead = vocabulary_of(target).chat_overhead
    requests = planned(server, "chat")
    assert {r.prompt_len for r in requests} == {64}
    assert overhead > 0
    assert {prompt_tokens(server, r) for r in requests} == {64 + overhead}
    assert planned(server, "chat") == requests
