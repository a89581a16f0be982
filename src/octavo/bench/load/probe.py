"""Finds out what a server is and can do, before anything is measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.bench.load.client import ReplyReader, body_of, path_of
from octavo.bench.load.http1 import Connections, Exchange, fetch
from octavo.bench.load.target import Api, Target
from octavo.bench.records import RequestRecord, TokenSource
from octavo.bench.workloads.request import PlannedRequest
from octavo.core.errors import ConfigError

_OWNERS = {
    "octavo": "octavo",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "tensorrt_llm": "tensorrt-llm",
}
_LENGTH_FIELDS = (("ignore_eos", "min_tokens"), ("ignore_eos",), ())
_NUM_TOKENS = 8
_TEXT = "One, two, three, four,"
_TOKEN_IDS = tuple(range(100, 108))
_TIMEOUT_S = 120.0  # a first request may find the model cold


async def probe(
    url: str,
    *,
    model: str | None = None,
    api: Api | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Target:
    """Ask the server for its models, and for a few tokens in a few ways.

    url: of the server, with or without /v1. model: the first one that is served unless told. api:
    completions, or chat where a server has only that. headers, sampling: as in Target. Raises
    ConfigError: nothing answers, the model isn't there, it does not stream.
    """
    base = url.rstrip("/")
    key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    target = Target(
        base_url=base if base.endswith("/v1") else f"{base}/v1",
        model=model or "",
        api=api or "completions",
        headers={**key, **(headers or {})},
    )
    if sampling is not None:
        target = replace(target, sampling=dict(sampling))
    async with Connections(target.base_url, target.headers) as connections:
        try:
            target = await _identified(connections, target)
            target = await _tried(connections, target, is_api_told=api is not None)
            if target.api == "chat":
                return replace(target, takes_token_ids=False)
            _, record = await _try(connections, target, _TOKEN_IDS)
        except ConnectionError as error:
            raise ConfigError(
                f"no server answers at {target.base_url} ({error}); start one, or correct the "
                "address"
            ) from None
        except TimeoutError:
            raise ConfigError(
                f"{target.base_url} has not answered within {_TIMEOUT_S:g} s; see what the server "
                "does, or restart it"
            ) from None
    num_ids = len(_TOKEN_IDS)
    is_taken = record.is_ok and record.num_prompt_tokens in (None, num_ids, num_ids + 1)
    return replace(target, takes_token_ids=is_taken)


async def _identified(connections: Connections, target: Target) -> Target:
    """With the model, the engine and what they tell of themselves."""
    exchange = await fetch(connections, "GET", f"{target.path}/models")
    if exchange.status in (401, 403):
        raise ConfigError(
            f"{target.base_url} wants a key (HTTP {exchange.status}); give one with --api-key"
        )
    cards = [card for card in _json(exchange).get("data") or () if isinstance(card, dict)]
    names = [str(card.get("id")) for card in cards]
    if not names and not target.model:
        raise ConfigError(
            f"{target.base_url}/models lists no model (HTTP {exchange.status}); give the address "
            "of an OpenAI-compatible server, or name the model with --model"
        )
    if names and target.model and target.model not in names:
        raise ConfigError(
            f"{target.base_url} does not serve {target.model!r}; it has {', '.join(names)}"
        )
    model = target.model or names[0]
    card = dict(zip(names, cards, strict=True)).get(model, {})

    async def told(path: str) -> dict[str, Any]:
        exchange = await fetch(connections, "GET", target.root + path)
        return _json(exchange) if exchange.status == 200 else {}

    engine = _OWNERS.get(str(card.get("owned_by")), "unknown")
    version = (await told("/version")).get("version")
    max_model_len = card.get("max_model_len")
    if engine == "unknown" and exchange.headers.get("server") == "llama.cpp":
        engine = "llama.cpp"
    if engine == "llama.cpp":
        props = await told("/props")
        version = props.get("build_info")
        max_model_len = props.get("default_generation_settings", {}).get("n_ctx")
        max_model_len = max_model_len or (card.get("meta") or {}).get("n_ctx")
    elif engine == "unknown":
        info = await told("/info")
        if "docker_label" in info:
            engine, version, max_model_len = "tgi", info.get("version"), info["max_total_tokens"]
    if engine == "unknown":
        info = await told("/get_server_info")
        if "mem_fraction_static" in info:
            engine, version = "sglang", info.get("version")
    return replace(
        target,
        model=model,
        engine=engine,
        version=str(version or ""),
        max_model_len=max_model_len,
    )


async def _tried(connections: Connections, target: Target, *, is_api_told: bool) -> Target:
    """With what a first stream shows. Servers refuse fields that they don't know, so the richest
    request comes first.
    """
    for gives_usage, fields in itertools.product((True, False), _LENGTH_FIELDS):
        target = replace(target, gives_usage=gives_usage, length_fields=fields)
        exchange, record = await _try(connections, target, _TEXT)
        if exchange.status in (404, 405) and target.api == "completions" and not is_api_told:
            target = replace(target, api="chat")
            exchange, record = await _try(connections, target, _TEXT)
        if exchange.status not in (400, 422):
            break
    url = f"{target.base_url.removesuffix(target.path)}{path_of(target)}"
    if exchange.status in (401, 403):
        raise ConfigError(f"{url} wants a key (HTTP {exchange.status}); give one with --api-key")
    if exchange.status != 200:
        raise ConfigError(
            f"{url} refuses a small request (HTTP {exchange.status}: {record.error}); see whether "
            "the server is of this kind, and whether --api completions or chat suits its model"
        )
    if not exchange.headers.get("content-type", "").startswith("text/event-stream"):
        raise ConfigError(
            f"{url} does not stream: it answers stream: true with "
            f"{exchange.headers.get('content-type')!r}; without a stream there is no time to first "
            "token"
        )
    if not record.is_ok:
        raise ConfigError(f"a first request to {url} failed ({record.error}); see the server's log")
    is_counted = record.token_source is TokenSource.USAGE
    num_tokens = record.num_output_tokens
    is_forced = not is_counted or num_tokens == _NUM_TOKENS
    return replace(
        target,
        gives_usage=target.gives_usage and is_counted,
        length_fields=target.length_fields if is_forced else (),
        tokens_per_chunk=num_tokens / len(record.chunk_ns) if record.chunk_ns else None,
    )


async def _try(
    connections: Connections, target: Target, prompt: str | tuple[int, ...]
) -> tuple[Exchange, RequestRecord]:
    request = PlannedRequest(
        index=0, class_name="probe", prompt=prompt, prompt_len=len(prompt), max_tokens=_NUM_TOKENS
    )
    body = body_of(target, request)
    exchange = await fetch(connections, "POST", path_of(target), body, _TIMEOUT_S)
    record = RequestRecord(
        index=0, class_name="probe", scheduled_ns=0, prompt_len=len(prompt), max_tokens=_NUM_TOKENS
    )
    reader = ReplyReader(record)
    for now, part in exchange.parts:
        reader.read(now, part)
    reader.finish(exchange)
    return exchange, record


def _json(exchange: Exchange) -> dict[str, Any]:
    """The object that came, or an empty one."""
    try:
        value = json.loads(exchange.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
