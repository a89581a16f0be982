"""What a client sees of a server that guesses: the same reply, and what became of the guesses.

The scripted model's drafts hold what it says itself, but for the guesses that it is told to miss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServerConfig
from support.scripted import (
    ScriptedExecutor,
    ScriptedServer,
    byte_model,
    ids_of,
    refused,
    saying,
    scripted_server,
)
from support.serve_command import serving

LENGTH = 8
WORDS = ("An ", "octavo", " is a ", "sheet", ", fold", "ed ", "into ", "eight", " leaves", ".")
TEXT = "".join(WORDS) * 2
MODEL = byte_model(WORDS)
SAID = ids_of(MODEL.tokenizer, *WORDS) * 2
END = min(MODEL.eos_token_ids)


def every_fifth(prompt: Sequence[int], count: int) -> bool:
    return count % 5 == 4


def server_of(draft_length: int, **executor: Any) -> Any:
    config = ServerConfig(enable_per_request_metrics=True)
    script = ScriptedExecutor(saying(SAID, END), **executor)
    return scripted_server(script, MODEL, config, draft_length=draft_length)


@pytest.fixture(scope="module", params=[False, True], ids=["right", "some wrong"])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    misguesses = {"is_misguess": every_fifth} if request.param else {}
    with server_of(LENGTH, **misguesses) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[ScriptedServer]:
    with server_of(0) as running:
        yield running


def streamed(server: ScriptedServer, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a streamed completion, and its chunks."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = server.complete(**fields, **options).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(pieces), chunks


def shown(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: reply[name] for name in ("choices", "usage")}


@pytest.mark.parametrize("begin", range(0, len(TEXT) // 2, 3))
def test_spd_02_stop_strings_anywhere_in_an_accepted_run(
    server: ScriptedServer, plain: ScriptedServer, begin: int
) -> None:
    """The step after the first token brings 9 at once: strings that its first one completes, those
    that began with the token before it, and all others.
    """
    stop = TEXT[begin : begin + 4]
    for fields in ({}, {"include_stop_str_in_output": True}, {"min_tokens": 6}):
        asked = {"max_tokens": 20, "stop": stop, "logprobs": 1, **fields}
        reply = server.complete(**asked).json()
        assert shown(reply) == shown(plain.complete(**asked).json())
        choice = reply["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        if not fields:
            assert choice["text"] == TEXT[: TEXT.index(stop)]
        text, chunks = streamed(server, **asked)
        assert text == choice["text"]
        assert chunks[-1]["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    server.wait_idle()


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_spd_04_exactly_max_tokens(server: ScriptedServer, max_tokens: int) -> None:
    before = server.metrics()
    asked = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    reply = server.complete(**asked).json()
    choice = reply["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == max_tokens
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == max_tokens
    _, chunks = streamed(server, **asked)
    tokens = [t for c in chunks[:-1] for t in c["choices"][0]["logprobs"]["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == max_tokens
    server.wait_idle()
    after = server.metrics()
    for name in ("generation_tokens_total", "request_generation_tokens_sum"):
        assert after[f"octavo:{name}"] - before[f"octavo:{name}"] == 2 * max_tokens


def test_spd_06_waits_for_grammars(server: ScriptedServer) -> None:
    """Output can't be constrained yet, so that no draft can run past a grammar's end; who builds
    grammars makes this the case's own test.
    """
    schema = {"name": "x", "schema": {"type": "object"}}
    form = {"type": "json_schema", "json_schema": schema}
    assert "not built yet" in refused(server.chat(response_format=form), "response_format")


@pytest.mark.parametrize("asked", [{"min_tokens": 3}, {"stop_token_ids": [SAID[4]]}])
def test_stop_tokens_inside_an_accepted_run(
    server: ScriptedServer, plain: ScriptedServer, asked: dict[str, Any]
) -> None:
    assert shown(server.complete(max_tokens=40, **asked).json()) == shown(
        plain.complete(max_tokens=40, **asked).json()
    )


def test_counters_agree_with_each_other_and_with_the_text(server: ScriptedServer) -> None:
    server.wait_idle()
    before = server.metrics()
    replies = [server.complete(max_tokens=10).json() for _ in range(3)]
    server.wait_idle()
    after = server.metrics()

    def grown(name: str) -> float:
        name = f"octavo:spec_decode_{name}"
        return after[name] - before[name]

    drafts, drafted = grown("num_drafts_total"), grown("num_draft_tokens_total")
    accepted = grown("num_accepted_tokens_total")
    positions = [
        grown(f'num_accepted_tokens_per_pos_total{{position="{i}"}}') for i in range(LENGTH)
    ]
    counts = [reply["metrics"]["speculative_decoding"] for reply in replies]
    for total, name in (
        (drafts, "num_drafts"), (drafted, "num_draft_tokens"), (accepted, "num_accepted_tokens"),
    ):  # fmt: skip
        assert total == sum(count[name] for count in counts) > 0
    assert sum(positions) == accepted
    assert positions == sorted(positions, reverse=True)
    assert drafts >= positions[0]
    # All but a sequence's first token came from steps with drafts, or needed none.
    steps = after["octavo:engine_steps_total"] - before["octavo:engine_steps_total"]
    assert steps + accepted == 3 * 10
    for method in ("saved", "wasted"):
        assert f'octavo:spec_decode_seconds_{method}_total{{method="scripted"}}' in after


def test_a_plain_server_has_no_counters_of_drafts(plain: ScriptedServer) -> None:
    assert not [name for name in plain.metrics() if "spec_decode" in name]


def test_metrics_of_a_request(server: ScriptedServer, plain: ScriptedServer) -> None:
    asked = {"max_tokens": 10}
    replies = [
        server.complete(**asked).json(),
        server.chat(**asked).json(),
        streamed(server, **asked)[1][-1],
    ]
    for reply in replies:
        metrics = reply["metrics"]
        assert metrics["time_to_first_token_ms"] > metrics["queue_time_ms"] >= 0
        assert metrics["tokens_per_second"] > 0
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 9)
        counts = metrics["speculative_decoding"]
        assert counts["num_drafts"] <= counts["num_accepted_tokens"] <= counts["num_draft_tokens"]
        assert counts["acceptance_rate"] == pytest.approx(
            counts["num_accepted_tokens"] / counts["num_draft_tokens"]
        )
        assert counts["mean_acceptance_length"] == pytest.approx(
            1 + counts["num_accepted_tokens"] / counts["num_drafts"]
        )
    assert plain.complete(**asked).json()["metrics"]["speculative_decoding"] is None
    # As in vLLM, of one sequence only.
    assert server.complete(**asked, n=2).json()["metrics"] is None
    assert server.complete(**asked, prompt=["a", "b"]).json()["metrics"] is None


def test_a_request_that_a_stop_string_ends_has_metrics_too(server: ScriptedServer) -> None:
    asked = {"max_tokens": 20, "stop": WORDS[3]}
    reply, (_, chunks) = server.complete(**asked).json(), streamed(server, **asked)
    for metrics in (reply["metrics"], chunks[-1]["metrics"]):
        assert metrics["speculative_decoding"]["num_drafts"] >= 1
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3)


def test_metrics_are_shown_only_where_the_server_is_told_to() -> None:
    with scripted_server(ScriptedExecutor(saying(SAID, END)), MODEL) as silent:
        assert "metrics" not in silent.complete(max_tokens=3).json()
        assert "metrics" not in silent.chat(max_tokens=3).json()
        assert "metrics" not in streamed(silent, max_tokens=3)[1][-1]


def test_the_command_serves_with_guesses(folder: Path, tmp_path: Path) -> None:
    settings = {"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": 2}
    value = json.dumps(settings | {"adaptive": False})
    flags = ("--speculative-config", value, "--enable-per-request-metrics")
    with serving(tmp_path / "log", str(folder), *flags) as process:
        reply = process.completion(max_tokens=20, ignore_eos=True).json()
        counts = reply["metrics"]["speculative_decoding"]
        assert process.metric("spec_decode_num_drafts_total") == counts["num_drafts"] > 0
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            assert process.metric(f"spec_decode_{name}_total") == counts[name]
        assert "layer_skip up to 2 tokens" in process.log.read_text()
