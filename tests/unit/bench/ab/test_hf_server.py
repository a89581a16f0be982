"""The baselines, on a tiny random model, against transformers' `generate` alone."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from octavo.bench.ab import hf_server
from octavo.bench.ab.hf_models import BatchCounts, HuggingFaceModel, NewToken, Row
from octavo.bench.ab.hf_server import batch_size, create_app
from octavo.core.errors import ConfigError
from octavo.core.request import FinishReason
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.oracle import load_oracle

PROMPTS = ([5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16], [40], [100, 101, 102, 103, 104])
LENGTHS = (12, 3, 20, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def model(folder: Path) -> HuggingFaceModel:
    return HuggingFaceModel(str(folder))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


def alone(oracle: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own greedy `generate` continues with; no token ends it."""
    import torch

    inputs = torch.tensor([prompt])
    output = oracle.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=[],
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def generate(model: HuggingFaceModel, rows: Sequence[Row]) -> tuple[list[NewToken], BatchCounts]:
    new: list[NewToken] = []
    counts = BatchCounts()
    model.generate(rows, new.extend, counts)
    return new, counts


def row(prompt: list[int], max_tokens: int, **options: Any) -> Row:
    return Row(prompt=prompt, max_tokens=max_tokens, on_token=lambda token: None, **options)


def of(new: list[NewToken], row: Row) -> list[int]:
    return [token.token_id for token in new if token.row is row]


def test_a_padded_batch_gives_each_prompt_its_own_tokens(
    model: HuggingFaceModel, oracle: Any
) -> None:
    rows = [row(p, n, ignores_eos=True) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    new, counts = generate(model, rows)
    for one, prompt, length in zip(rows, PROMPTS, LENGTHS, strict=True):
        assert of(new, one) == alone(oracle, prompt, length)
        assert [t.finish_reason for t in new if t.row is one][-1] is FinishReason.LENGTH
    assert counts.batches == 1
    assert counts.engine_steps == 20  # the longest decides
    assert counts.taken_slots == 4 * 20
    assert counts.scheduled_sequences == counts.generation_tokens == sum(LENGTHS)
    # A cache of 8 positions after the prefill, 27 before the last token: none for that one.
    assert counts.kv_capacity_tokens == 4 * sum(range(8, 28))
    assert counts.kv_tokens == sum(
        sum(range(len(p), len(p) + n)) for p, n in zip(PROMPTS, LENGTHS, strict=True)
    )
    assert counts.prompt_tokens == 17
    assert counts.padding_tokens == 4 * 8 - 17
    assert counts.generate_seconds > counts.handing_out_seconds > 0


def test_an_end_token_ends_a_row_unless_it_is_ignored_or_too_early(
    model: HuggingFaceModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(oracle, PROMPTS[0], 12)
    end = expected[4]
    first = expected.index(end)
    monkeypatch.setattr(model, "eos_token_ids", {end})
    rows = [
        row(PROMPTS[0], 12),
        row(PROMPTS[0], 12, ignores_eos=True),
        row(PROMPTS[0], 12, min_tokens=8),
    ]
    new, _ = generate(model, rows)
    assert of(new, rows[0]) == expected[: first + 1]
    assert [t.finish_reason for t in new if t.row is rows[0]][-1] is FinishReason.STOP
    assert of(new, rows[1]) == expected
    assert end not in of(new, rows[2])[:8]
    assert rows[2].num_tokens >= 8


def test_a_row_whose_client_has_left_does_not_hold_the_batch(model: HuggingFaceModel) -> None:
    rows = [row(PROMPTS[0], 50, ignores_eos=True), row(PROMPTS[1], 4, ignores_eos=True)]

    def leave(new: list[NewToken]) -> None:
        rows[0].is_done = True

    counts = BatchCounts()
    model.generate(rows, leave, counts)
    assert rows[0].num_tokens == 1
    assert counts.engine_steps == 4


@pytest.fixture
def client(model: HuggingFaceModel) -> Iterator[TestClient]:
    with TestClient(create_app(model, "hf-static", 4)) as client:
        yield client


def complete(client: TestClient, prompt: Any, max_tokens: int, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return client.post("/v1/completions", json=body | fields)


def test_requests_that_come_together_share_a_batch_and_have_exact_lengths(
    client: TestClient, model: HuggingFaceModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_server, "_GATHER_SECONDS", 0.5)
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(complete, [client] * 4, PROMPTS, LENGTHS))
    for reply, prompt, length in zip(replies, PROMPTS, LENGTHS, strict=True):
        body = reply.json()
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": length,
            "total_tokens": len(prompt) + length,
        }
        assert body["choices"][0]["finish_reason"] == "length"
        text = model.tokenizer.decode(prompt + alone(oracle, prompt, length))
        assert body["choices"][0]["text"] == text.removeprefix(model.tokenizer.decode(prompt))
    counters = dict(
        line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#"
    )
    assert counters["octavo:batches_total"] == "1"
    assert counters["octavo:generation_tokens_total"] == str(sum(LENGTHS))
    assert counters["octavo:num_requests_running"] == counters["octavo:num_requests_waiting"] == "0"
    assert float(counters["octavo:shim_seconds_total"]) > 0


def test_a_stream_has_the_same_text_in_chunks_and_ends_with_usage(client: TestClient) -> None:
    whole = complete(client, PROMPTS[1], 12).json()["choices"][0]["text"]
    options = {"include_usage": True}
    reply = complete(client, PROMPTS[1], 12, stream=True, stream_options=options)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    *texts, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == whole
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    assert len(texts) > 1


def test_text_prompts_are_tokenized_as_by_tokenize(client: TestClient) -> None:
    count = client.post("/tokenize", json={"prompt": "the printer"}).json()
    assert count["count"] == len(count["tokens"])
    usage = complete(client, "the printer", 2).json()["usage"]
    assert usage["prompt_tokens"] == count["count"]
    (card,) = client.get("/v1/models").json()["data"]
    assert card["max_model_len"] == count["max_model_len"] == 512
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.7}, "temperature must be 0"),
        ({"logprobs": 3}, "does not have the field 'logprobs'"),
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"max_tokens": 0}, "from 1"),
        ({"max_tokens": 600}, "512 of the context"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [5000]}, "0 to 319"),
    ],
)
def test_what_it_can_not_do_is_refused(
    client: TestClient, fields: dict[str, Any], message: str
) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 4, **fields}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_a_batch_that_fails_is_told_to_its_clients_and_the_next_one_runs(
    client: TestClient, model: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as broken:
        broken.setattr(model, "generate", fail)
        assert complete(client, PROMPTS[0], 4).status_code == 500
        events = complete(client, PROMPTS[0], 4, stream=True).text
        assert '"error"' in events
    assert complete(client, PROMPTS[0], 4).status_code == 200


def test_a_client_that_hangs_up_ends_its_row(model: HuggingFaceModel) -> None:
    async def leave() -> BatchCounts:
        batcher = hf_server.Batcher(model, 1)
        running = asyncio.create_task(batcher.run())
        tokens: asyncio.Queue[NewToken] = asyncio.Queue()
        one = Row(prompt=[5], max_tokens=400, ignores_eos=True, on_token=tokens.put_nowait)
        batcher.add(one)
        await tokens.get()
        one.is_done = True
        another = Row(prompt=[6], max_tokens=1, ignores_eos=True, on_token=tokens.put_nowait)
        batcher.add(another)
        while (await tokens.get()).row is one:
            pass
        running.cancel()
        return batcher.counts

    counts = asyncio.run(leave())
    assert counts.batches == 2
    assert counts.generation_tokens < 400


def options(batching: str = "static", **values: Any) -> Namespace:
    return Namespace(
        batching=batching,
        batch_size=values.get("batch_size"),
        kv_cache_memory_bytes=values.get("kv_cache_memory_bytes"),
        max_model_len=values.get("max_model_len"),
    )


def test_a_batch_is_what_fits_when_each_reserves_the_longest(model: HuggingFaceModel) -> None:
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, bytes
    size, reason = batch_size(
        model, options(kv_cache_memory_bytes=5.9 * 512 * 64, max_model_len=64)
    )
    assert size == 5
    assert "64 tokens" in reason
    assert batch_size(model, options("naive"))[0] == 1
    assert batch_size(model, options(batch_size=3))[0] == 3
    with pytest.raises(ConfigError, match="omit one"):
        batch_size(model, options(batch_size=3, kv_cache_memory_bytes=1e9))
    with pytest.raises(ConfigError, match="one request of 512 tokens"):
        batch_size(model, options(kv_cache_memory_bytes=1000))


def test_bfloat16_halves_the_cache(folder: Path) -> None:
    assert HuggingFaceModel(str(folder), dtype="bfloat16").kv_bytes_per_token == 256


def test_a_gguf_file_gives_the_same_tokens(tmp_path: Path, folder: Path, oracle: Any) -> None:
    model = HuggingFaceModel(str(write_gguf(folder, tmp_path / "tiny.gguf")))
    one = row(PROMPTS[1], 12, ignores_eos=True)
    new, _ = generate(model, [one])
    assert of(new, one) == alone(oracle, PROMPTS[1], 12)


def test_without_transformers_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"octavo\[baselines\]"):
        HuggingFaceModel(str(folder))
