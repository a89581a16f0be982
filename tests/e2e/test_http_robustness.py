"""Whatever clients send, and whenever they leave, the server is as good as new afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

from support.scripted import ScriptedExecutor, byte_model, scripted_server

NUM_REQUESTS = 200
NUM_BLOCKS = 64


GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 2],
    "top_p": [1, 0.5],
    "top_k": [-1, 0, 5],
    "n": [1, 2, 4],
    "max_tokens": [1, 5, 50, 150],
    "min_tokens": [0, 1],
    "stop": ["b", ["xy", "z"]],
    "stop_token_ids": [[98]],
    "ignore_eos": [True, False],
    "echo": [True, False],
    "seed": [1, -1],
    "priority": [0, -5],
    "cache_salt": ["a", "b"],
    "stream": [True, False],
}
BAD: dict[str, list[Any]] = {
    "temperature": [-1, "x"],
    "top_p": [0],
    "n": [0],
    "max_tokens": [10**9],
    "min_tokens": [10**6],
    "stop": [[""], 5],
    "stop_token_ids": [[10**9]],
    "seed": [2**80],
    "bogus": [1],
    "suffix": ["x"],
}


def random_fields(rng: random.Random) -> dict[str, Any]:
    fields = {name: rng.choice(GOOD[name]) for name in rng.sample(sorted(GOOD), rng.randint(0, 6))}
    if rng.random() < 0.2:
        name = rng.choice(sorted(BAD))
        fields[name] = rng.choice(BAD[name])
    return fields


def random_body(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.random()
    if kind < 0.05:
        body = bytes(rng.randrange(256) for _ in range(rng.randint(0, 200)))
        return "/v1/completions", body
    fields = random_fields(rng)
    text = "".join(rng.choice("ab é🌶\0\n") for _ in range(rng.choice([0, 1, 20, 100, 2000])))
    if kind < 0.5:
        path = "/v1/chat/completions"
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        path = "/v1/completions"
        ids = [rng.randrange(256) for _ in range(rng.randint(1, 200))]
        fields["prompt"] = rng.choice([text, ids, [text, "x"], [ids, [1]]])
    body = json.dumps(fields).encode()
    return path, body[: rng.randrange(len(body))] if rng.random() < 0.05 else body


async def one_request(http: httpx.AsyncClient, rng: random.Random) -> int | None:
    """The status; None if this client left before the end."""
    path, body = random_body(rng)
    patience = rng.choice([None, None, None, 0.005, 0.05])
    await asyncio.sleep(rng.random())
    headers = {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(patience):
            response = await http.post(path, content=body, headers=headers)
    except TimeoutError:
        return None
    if response.status_code != 200:
        assert "error" in response.json()
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"]
    return response.status_code


def test_two_hundred_random_requests() -> None:
    def script(prompt: Any, count: int) -> int:
        return (sum(prompt[:3]) + 7 * count) % 258

    def fault(prompt: Any, count: int) -> str | None:
        return "unlucky" if len(prompt) == 13 and count == 2 else None

    executor = ScriptedExecutor(script, num_blocks=NUM_BLOCKS, step_seconds=0.001, fault=fault)
    model = byte_model(max_model_len=600)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_num_queued_reqs": 100}

    async def storm() -> list[int | None]:
        rng = random.Random(20)
        bounds = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=bounds) as http:
            seeds = [random.Random(rng.random()) for _ in range(NUM_REQUESTS)]
            return await asyncio.gather(*[one_request(http, seed) for seed in seeds])

    with scripted_server(executor, model, **limits) as server:
        statuses = asyncio.run(storm())
        assert statuses.count(200) > 20
        assert statuses.count(400) > 20
        assert statuses.count(None) > 20
        assert set(statuses) <= {200, 400, 500, 503, None}
        server.wait_idle()
        assert server.http.get("/health").status_code == 200
        assert server.complete(max_tokens=2, ignore_eos=True).status_code == 200
        server.wait_idle()
        found = server.metrics()
        assert found["octavo:kv_cache_usage_perc"] == found["octavo:num_requests_running"] == 0
        assert (
            found["octavo:generation_tokens_total"]
            == (found["octavo:request_generation_tokens_sum"])
        )
        assert found["octavo:prompt_tokens_total"] == found["octavo:request_prompt_tokens_sum"]
