from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from octavo.bench.load.probe import probe
from octavo.bench.load.target import Target
from octavo.core.errors import ConfigError
from support.mock_server import MockServer, Reply, Respond, answer, stream

REFUSED = answer({"error": {"message": "unknown field"}}, 400)


def probed(
    respond: Respond | None = None,
    *,
    card: Mapping[str, Any] | None = None,
    routes: Mapping[str, Respond] | None = None,
    path: str = "",
    **options: Any,
) -> tuple[Target, MockServer]:
    async def run() -> tuple[Target, MockServer]:
        server = MockServer(respond or stream(), model=card, routes=routes)
        async with server:
            return await probe(server.url + path, **options), server

    return asyncio.run(run())


def strict(*known: str) -> Respond:
    """Refuses what it does not know, as Octavo does."""
    all_known = {"model", "prompt", "messages", "max_tokens", "stream", "temperature", *known}
    usage = "last" if "stream_options" in known else "never"

    async def respond(reply: Reply) -> None:
        await (stream(usage_on=usage)(reply) if reply.json.keys() <= all_known else REFUSED(reply))

    return respond


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_address_with_and_without_v1(path: str) -> None:
    target, server = probed(path=path)
    assert target.base_url == f"{server.url}/v1"
    assert (target.model, target.api, target.engine) == ("mock", "completions", "unknown")
    assert target.takes_token_ids
    assert target.forces_length
    assert target.gives_usage
    assert target.tokens_per_chunk == 1.0


def test_several_tokens_a_chunk_are_noticed() -> None:
    assert probed(stream(tokens_per_chunk=4))[0].tokens_per_chunk == 4.0


class TestWhatTheServerTakes:
    @pytest.mark.parametrize(
        ("known", "length_fields", "gives_usage"),
        [
            (("stream_options", "ignore_eos", "min_tokens"), ("ignore_eos", "min_tokens"), True),
            (("stream_options", "ignore_eos"), ("ignore_eos",), True),
            (("stream_options",), (), True),
            (("ignore_eos", "min_tokens"), ("ignore_eos", "min_tokens"), False),
            ((), (), False),
        ],
    )
    def test_fields_that_are_refused_are_left_out(
        self, known: tuple[str, ...], length_fields: tuple[str, ...], gives_usage: bool
    ) -> None:
        target, _ = probed(strict(*known))
        assert target.length_fields == length_fields
        assert target.forces_length == bool(length_fields)
        assert target.gives_usage == gives_usage

    def test_a_length_that_is_asked_for_in_vain_is_not_forced(self) -> None:
        target, _ = probed(stream(num_tokens=3, finish_reason="stop"))
        assert not target.forces_length

    def test_usage_that_is_asked_for_in_vain_is_not_given(self) -> None:
        target, _ = probed(stream(usage_on="never"))
        assert not target.gives_usage
        assert target.forces_length

    def test_token_ids_that_are_refused(self) -> None:
        async def respond(reply: Reply) -> None:
            is_text = isinstance(reply.json["prompt"], str)
            await (stream()(reply) if is_text else REFUSED(reply))

        assert not probed(respond)[0].takes_token_ids

    def test_token_ids_that_are_taken_for_text(self) -> None:
        async def respond(reply: Reply) -> None:
            prompt = reply.json["prompt"]
            num_tokens = len(prompt) if isinstance(prompt, str) else len(str(prompt))
            reply.body = reply.body.replace(b'"prompt":', b'"old":')
            reply.body = reply.body[:-1] + b',"prompt":"%s"}' % (b"x" * num_tokens)
            await stream()(reply)

        assert not probed(respond)[0].takes_token_ids

    def test_a_server_that_only_chats(self) -> None:
        async def respond(reply: Reply) -> None:
            await (stream(role_first=True) if reply.is_chat else answer({}, 404))(reply)

        target, _ = probed(respond)
        assert (target.api, target.takes_token_ids) == ("chat", False)

    def test_the_api_may_be_told(self) -> None:
        target, server = probed(api="chat")
        assert target.api == "chat"
        assert all(reply.is_chat for reply in server.replies)

    def test_headers_key_and_sampling_go_with_each_request(self) -> None:
        target, server = probed(api_key="k", headers={"X-A": "b"}, sampling={"temperature": 0.5})
        for reply in server.replies:
            assert reply.headers["authorization"] == "Bearer k"
            assert reply.headers["x-a"] == "b"
            assert reply.json["temperature"] == 0.5
        assert target.headers == {"Authorization": "Bearer k", "X-A": "b"}


class TestEngines:
    @pytest.mark.parametrize(
        ("owner", "engine"),
        [
            ("octavo", "octavo"),
            ("vllm", "vllm"),
            ("sglang", "sglang"),
            ("tensorrt_llm", "tensorrt-llm"),
        ],
    )
    def test_those_that_own_their_models(self, owner: str, engine: str) -> None:
        routes = {"GET /version": answer({"version": "1.2"})}
        card = {"owned_by": owner, "max_model_len": 512}
        target, _ = probed(card=card, routes=routes)
        assert (target.engine, target.version, target.max_model_len) == (engine, "1.2", 512)

    @pytest.mark.parametrize("owner", ["llamacpp", "someone"])
    def test_llama_cpp(self, owner: str) -> None:
        props = {"build_info": "b1", "default_generation_settings": {"n_ctx": 1024}}
        card = {"id": "m", "owned_by": owner, "meta": {"n_ctx": 4096}}
        routes = {
            "GET /props": answer(props),
            "GET /v1/models": answer({"data": [card]}, Server="llama.cpp"),
        }
        target, _ = probed(routes=routes)
        told = (target.engine, target.version, target.max_model_len)
        assert told == ("llama.cpp", "b1", 1024)
        target, _ = probed(routes={"GET /v1/models": routes["GET /v1/models"]})
        assert target.max_model_len == 4096

    def test_tgi(self) -> None:
        info = {"docker_label": "sha-1", "version": "3.3", "max_total_tokens": 2048}
        target, _ = probed(routes={"GET /info": answer(info)})
        assert (target.engine, target.version, target.max_model_len) == ("tgi", "3.3", 2048)

    def test_sglang_that_serves_under_another_owner(self) -> None:
        info = {"mem_fraction_static": 0.88, "version": "0.5"}
        target, _ = probed(routes={"GET /get_server_info": answer(info)})
        assert (target.engine, target.version) == ("sglang", "0.5")


class TestErrors:
    """Each names the address and what to do."""

    @staticmethod
    def message(*args: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            probed(*args, **options)
        assert "http://127.0.0.1" in str(caught.value)
        return str(caught.value)

    def test_nothing_there(self) -> None:
        with pytest.raises(ConfigError, match=r"http://127.0.0.1:1/v1 .*start one"):
            asyncio.run(probe("http://127.0.0.1:1"))

    def test_no_such_model(self) -> None:
        assert "does not serve 'other'; it has mock" in self.message(model="other")

    def test_no_models(self) -> None:
        said = self.message(routes={"GET /v1/models": answer({}, 404)})
        assert "lists no model (HTTP 404)" in said
        assert "--model" in said
        target, _ = probed(routes={"GET /v1/models": answer({}, 404)}, model="named")
        assert target.model == "named"

    def test_a_key_is_wanted(self) -> None:
        assert "--api-key" in self.message(routes={"GET /v1/models": answer({}, 401)})
        assert "--api-key" in self.message(answer({}, 401))

    def test_a_server_that_refuses_all(self) -> None:
        said = self.message(REFUSED)
        assert "HTTP 400: unknown field" in said
        assert "--api" in said

    def test_a_server_that_does_not_stream(self) -> None:
        assert "does not stream" in self.message(answer({"choices": []}))

    def test_a_stream_that_fails(self) -> None:
        assert "without a finish_reason" in self.message(stream(finish_reason=None))

    def test_a_server_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("octavo.bench.load.probe._TIMEOUT_S", 0.05)
        assert "not answered within 0.05 s" in self.message(stream(ttft_s=60.0))
