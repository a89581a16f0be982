"""What counts as output, as tokens, as a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench.load.client import ReplyReader, body_of, path_of
from octavo.bench.load.http1 import Exchange, ProtocolError
from octavo.bench.load.target import Target
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.workloads.request import PlannedRequest
from support.load import planned, played
from support.mock_server import DONE, Reply, Respond, answer, chunk, event, stream, usage

COMPLETIONS = Target(base_url="http://host/v1", model="m")
CHAT = replace(COMPLETIONS, api="chat")


def read(*events: dict[str, Any] | bytes, **exchange: Any) -> RequestRecord:
    """The record of a stream whose events came at 1, 2, 3 ... ns."""
    record = RequestRecord(index=0, class_name="", scheduled_ns=0, prompt_len=1, max_tokens=100)
    reader = ReplyReader(record, keep_text=True)
    whole = Exchange(sent_ns=0, head_ns=0, end_ns=99, status=200)
    for name, value in exchange.items():
        setattr(whole, name, value)
    for now, payload in enumerate(events, start=1):
        part = payload if isinstance(payload, bytes) else event(payload)
        whole.parts.append((now, part))
        reader.read(now, part)
    reader.finish(whole)
    return record


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def text(value: str, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": value, "finish_reason": finish_reason}
    return {"choices": [choice | fields]}


END = delta("stop")


class TestOutputChunks:
    def test_ben_05_those_without_output_do_not_count_as_the_first_token(self) -> None:
        record = read(
            delta(content=""),
            delta(content=None),
            delta(),
            {"choices": []},
            delta(content="<|im_start|>"),
            delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
            delta(tool_calls=[]),
            END,
            DONE,
        )
        assert record.is_ok
        assert record.chunk_ns == [5, 6]
        assert record.text == "<|im_start|>"

    def test_ben_05_a_reply_of_such_chunks_alone_is_a_success(self) -> None:
        record = read(delta(content=""), delta(content=None), END)
        assert record.is_ok
        assert (record.chunk_ns, record.num_output_tokens) == ([], 0)

    def test_ben_07_the_role_is_not_the_first_token(self) -> None:
        record = read(delta(role="assistant", content=""), delta(content="hi"), END)
        assert record.chunk_ns == [2]

    @pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content", "refusal"])
    def test_all_that_a_user_reads_counts(self, name: str) -> None:
        record = read(delta(role="assistant"), delta(**{name: "a"}), delta(**{name: "b"}), END)
        assert (record.chunk_ns, record.text) == ([2, 3], "ab")

    def test_reasoning_under_two_names_is_one_text(self) -> None:
        assert read(delta(reasoning="hm", reasoning_content="hm"), END).text == "hm"

    def test_tokens_without_text_count(self) -> None:
        record = read(text("", token_ids=[1, 2]), text("é", token_ids=[3]), text("", "stop"))
        assert record.chunk_ns == [1, 2]

    def test_the_end_and_the_usage_do_not(self) -> None:
        record = read(text("a"), text("", "length"), {"choices": [], "usage": usage(1, 1)}, DONE)
        assert record.chunk_ns == [1]

    def test_text_with_the_finish_reason_counts(self) -> None:
        assert read(text("a"), text("b", "length")).chunk_ns == [1, 2]

    def test_events_of_one_read_have_one_time(self) -> None:
        assert read(event(text("a")) + event(text("b")), event(text("", "stop"))).chunk_ns == [1, 1]

    def test_an_event_has_the_time_of_its_last_byte(self) -> None:
        whole = event(text("a"))
        assert read(whole[:9], whole[9:-1], whole[-1:], END).chunk_ns == [3]


class TestTokens:
    def test_ben_03_usage_counts_not_what_was_asked_for(self) -> None:
        record = read(text("a"), text("b", "stop"), {"choices": [], "usage": usage(7, 10, 3)})
        assert (record.num_output_tokens, record.token_source) == (10, TokenSource.USAGE)
        assert (record.num_prompt_tokens, record.num_cached_tokens) == (7, 3)
        assert record.chunk_tokens is None

    def test_usage_on_each_chunk_tells_what_is_in_it(self) -> None:
        record = read(
            text("a") | {"usage": usage(7, 1)},
            text("") | {"usage": usage(7, 2)},  # half a character
            text("") | {"usage": usage(7, 2)},
            text("é") | {"usage": usage(7, 5)},
            text("", "stop") | {"usage": usage(7, 6)},
        )
        assert record.chunk_ns == [1, 2, 4]
        assert record.chunk_tokens == [1, 1, 3]
        assert record.num_output_tokens == 6

    def test_token_ids_tell_what_is_in_a_chunk(self) -> None:
        record = read(text("a", token_ids=[1]), text("bc", "length", token_ids=[2, 3]))
        assert record.chunk_tokens == [1, 2]
        assert (record.num_output_tokens, record.token_source) == (3, TokenSource.USAGE)

    @pytest.mark.parametrize(
        "logprobs", [{"tokens": ["a", "b"]}, {"content": [{"token": "a"}, {"token": "b"}]}]
    )
    def test_logprobs_tell_what_is_in_a_chunk(self, logprobs: dict[str, Any]) -> None:
        assert read(text("ab", "stop", logprobs=logprobs)).chunk_tokens == [2]

    def test_a_chunk_that_does_not_tell_leaves_all_unknown(self) -> None:
        record = read(text("a", token_ids=[1]), text("b", "stop"))
        assert record.chunk_tokens is None
        assert (record.num_output_tokens, record.token_source) == (2, TokenSource.CHUNKS)

    def test_without_usage_a_chunk_is_taken_for_a_token(self) -> None:
        record = read(text("a"), text("b"), text("", "stop"))
        assert (record.num_output_tokens, record.token_source) == (2, TokenSource.CHUNKS)
        assert (record.num_prompt_tokens, record.num_cached_tokens) == (None, None)


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (400, Failure.REFUSED),
            (404, Failure.REFUSED),
            (500, Failure.REFUSED),
            (429, Failure.OVERLOADED),
            (503, Failure.OVERLOADED),
        ],
    )
    @pytest.mark.parametrize(
        "body", [{"error": {"message": "why"}}, {"error": "why"}, {"message": "why"}, "why"]
    )
    def test_a_status_says_the_kind_and_the_body_says_why(
        self, status: int, kind: Failure, body: Any
    ) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        record = read(data, status=status)
        assert (record.failure, record.error, record.status) == (kind, "why", status)
        assert not record.is_ok

    @pytest.mark.parametrize(
        "error", [{"error": {"message": "died"}}, {"object": "error", "message": "died"}]
    )
    def test_an_error_inside_the_stream(self, error: dict[str, Any]) -> None:
        record = read(text("a"), error, DONE)
        assert (record.failure, record.error) == (Failure.SERVER_ERROR, "died")
        assert record.chunk_ns == [1]

    @pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 7\n\n", b"data: \xff\n\n"])
    def test_an_event_that_is_no_chunk(self, data: bytes) -> None:
        assert read(text("a"), data, END).failure is Failure.SERVER_ERROR

    @pytest.mark.parametrize("error", [None, ProtocolError("closed")])
    def test_a_stream_without_a_finish_reason_was_cut(self, error: Exception | None) -> None:
        assert read(text("a"), error=error).failure is Failure.TRUNCATED
        assert read(text("a"), DONE, error=error).failure is Failure.TRUNCATED
        assert read(error=error).failure is Failure.TRUNCATED

    def test_a_stream_is_whole_with_its_finish_reason(self) -> None:
        """BEN-09: whether [DONE] comes, or a proper end."""
        assert read(text("a"), text("", "stop"), error=ProtocolError("closed")).is_ok
        assert read(text("a"), event(text("", "stop"))[:-2], error=ProtocolError("closed")).is_ok

    def test_a_lost_connection(self) -> None:
        reset = ConnectionResetError("reset")
        assert read(text("a"), error=reset).failure is Failure.CONNECTION
        record = read(head_ns=None, status=0, error=ProtocolError("closed"))
        assert (record.failure, record.error, record.status) == (Failure.CONNECTION, "closed", None)


class TestBodies:
    @staticmethod
    def body(target: Target, prompt: Any, **fields: Any) -> dict[str, Any]:
        request = PlannedRequest(
            index=0, class_name="", prompt=prompt, prompt_len=3, max_tokens=5, **fields
        )
        parsed: dict[str, Any] = json.loads(body_of(target, request))
        return parsed

    def test_a_completion(self) -> None:
        assert self.body(COMPLETIONS, (1, 2, 3)) == {
            "model": "m",
            "temperature": 0,
            "prompt": [1, 2, 3],
            "max_tokens": 5,
            "ignore_eos": True,
            "min_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert path_of(COMPLETIONS) == "/v1/completions"

    def test_a_chat(self) -> None:
        messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
        assert self.body(CHAT, messages)["messages"] == list(messages)
        assert self.body(CHAT, "u")["messages"] == [{"role": "user", "content": "u"}]
        assert path_of(CHAT) == "/v1/chat/completions"

    def test_only_what_the_server_takes(self) -> None:
        plain = replace(COMPLETIONS, length_fields=(), gives_usage=False, sampling={"top_k": 1})
        assert self.body(plain, "x") == {
            "model": "m",
            "top_k": 1,
            "prompt": "x",
            "max_tokens": 5,
            "stream": True,
        }
        assert not plain.forces_length

    def test_a_length_is_forced_only_if_planned(self) -> None:
        assert "ignore_eos" not in self.body(COMPLETIONS, "x", is_forced=False)

    def test_a_server_behind_a_path(self) -> None:
        target = replace(COMPLETIONS, base_url="http://host:1/some/v1")
        assert path_of(target) == "/some/v1/completions"
        assert target.root == "/some"


# --- through a socket -------------------------------------------------------------------------


def tell(reply: Reply) -> bytes:
    return (
        b": comment\r\n\r\n"
        + chunk(reply, "t\u00e9l\u00e9 \U0001f4d6").replace(b"data: ", b"data:")
        + chunk(reply, " two").replace(b"\n", b"\r\n")
        + chunk(reply, " three").replace(b', "choices"', b',\ndata: "choices"')
        + chunk(reply, "", "stop", usage=usage(4, 3))
    )


def framed(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def every_byte(reply: Reply) -> tuple[bytes, int, bool]:
    return framed(tell(reply) + DONE), 1, False


def one_write(reply: Reply) -> tuple[bytes, int, bool]:
    return framed(tell(reply) + DONE), 1 << 20, False


def no_blank_line(reply: Reply) -> tuple[bytes, int, bool]:
    return b"HTTP/1.1 200 OK\r\n\r\n" + tell(reply)[:-1], 5, True


def no_done(reply: Reply) -> tuple[bytes, int, bool]:
    return framed(tell(reply)), 1 << 20, False


@pytest.mark.parametrize("ways", [every_byte, one_write, no_blank_line, no_done])
def test_ben_09_the_same_reply_however_it_is_cut(ways: Any) -> None:
    async def respond(reply: Reply) -> None:
        data, size, hangs_up = ways(reply)
        await reply.send_raw(data, size)
        if hangs_up:
            reply.hang_up()

    run, _ = played(respond, planned(), keep_text=True)
    (record,) = run.records
    assert record.text == "t\u00e9l\u00e9 \U0001f4d6 two three"
    assert (record.is_ok, record.num_output_tokens, len(record.chunk_ns)) == (True, 3, 3)


@pytest.mark.parametrize(
    ("respond", "kind"),
    [
        (answer({"error": {"message": "slow down"}}, 429), Failure.OVERLOADED),
        (answer({"error": {"message": "no"}}, 400), Failure.REFUSED),
        (stream(finish_reason=None), Failure.TRUNCATED),
    ],
)
def test_failures_are_noted_and_the_loop_goes_on(respond: Respond, kind: Failure) -> None:
    run, server = played(respond, planned(5), concurrency=2)
    assert [record.failure for record in run.records] == [kind] * 5
    assert len(server.replies) == 5


@pytest.mark.parametrize("count", [0, 1, 2])
def test_ben_01_replies_of_no_one_and_two_tokens(count: int) -> None:
    run, _ = played(stream(num_tokens=count), planned(3), concurrency=3)
    for record in run.records:
        assert record.is_ok
        assert (record.num_output_tokens, len(record.chunk_ns)) == (count, count)
