"""The official client, as applications use it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from octavo.config import ServerConfig
from support.scripted import ScriptedExecutor, ScriptedServer, byte_model, saying, scripted_server

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    model = byte_model()
    executor = ScriptedExecutor(saying(list("Héllo!".encode()), model.tokenizer.eos_ids[0]))
    with scripted_server(executor, model, ServerConfig(api_key=["key"])) as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as found:
        yield found


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="scripted", messages=HELLO, user="me", store=False)
    assert reply.choices[0].message.content == "Héllo!"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8
    assert reply.system_fingerprint == "fp_scripted"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="org/alias",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Héllo!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 21 + 8
    assert {chunk.model for chunk in chunks} == {"org/alias"}


def test_n_logprobs_and_stop(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="scripted", messages=HELLO, n=2, logprobs=True, top_logprobs=2, stop=["lo"]
    )
    assert [choice.message.content for choice in reply.choices] == ["Hél", "Hél"]
    logprobs = reply.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content][-2:] == ["l", "o"]
    assert len(logprobs.content[0].top_logprobs) == 2


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="scripted", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True
    )
    assert [choice.text for choice in reply.choices] == ["aHé", "bHé"]
    stream = client.completions.create(model="scripted", prompt=[5, 6], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Héllo!"


def test_vllm_fields_go_in_extra_body(server: ScriptedServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        extra_body={"top_k": 3, "min_p": 0.1, "ignore_eos": True},
        max_tokens=2,
    )
    used = server.executor.bindings[-1].sampling
    assert (used.top_k, used.min_p, used.ignore_eos) == (3, 0.1, True)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted", "org/alias"]
    assert client.models.retrieve("org/alias").id == "org/alias"


def test_errors(server: ScriptedServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.type == "BadRequestError"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="scripted",
            messages=HELLO,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_str_09_an_error_in_a_stream_is_raised() -> None:
    executor = ScriptedExecutor(
        lambda prompt, count: 97,
        fault=lambda prompt, count: "the model gave non-finite logits" if count == 3 else None,
    )
    with (
        scripted_server(executor, byte_model()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        seen = [next(stream).choices[0].delta.content for _ in range(4)]
        assert seen == ["", "a", "a", "a"]
        with pytest.raises(openai.APIError, match="non-finite logits"):
            next(stream)
