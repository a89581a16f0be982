"""Loops that are closed and open, against a server that notes what it really did."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench.load.generator import play, stop_on_interrupt
from octavo.bench.load.plan import LoadPoint
from octavo.bench.load.target import Target
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.statistics import percentile
from octavo.core.errors import OctavoError
from support.load import in_a_quiet_moment, is_near, planned, played
from support.mock_server import MockServer, Queue, Reply, answer, in_turn, stream


def ms(later_ns: int | None, earlier_ns: int | None) -> float:
    assert later_ns is not None
    assert earlier_ns is not None
    return (later_ns - earlier_ns) / 1e6


def gaps_ms(times_ns: list[int]) -> list[float]:
    return [ms(later, earlier) for earlier, later in itertools.pairwise(times_ns)]


def tpot_ms(record: RequestRecord) -> float:
    return ms(record.chunk_ns[-1], record.chunk_ns[0]) / (record.num_output_tokens - 1)


class TestTimes:
    """Within 1 ms or 1 % of what the server did."""

    @staticmethod
    def agrees(respond: Any, *, num_before: int = 0, num_tokens: int = 6) -> bool:
        """Of each reply: time to first token, gaps, end. num_before: writes before any output."""
        run, server = played(respond, planned(3, max_tokens=num_tokens), concurrency=3)
        replies = sorted(server.replies, key=lambda reply: reply.arrived_ns)
        for record, reply in zip(
            sorted(run.records, key=lambda r: r.sent_ns or 0), replies, strict=True
        ):
            written = reply.writes_ns[num_before:]
            came = sorted(set(record.chunk_ns))
            pairs = [(ms(came[0], record.sent_ns), ms(written[0], reply.arrived_ns))]
            pairs += zip(gaps_ms(came), gaps_ms(written[: len(came)]), strict=True)
            pairs += [(ms(record.done_ns, record.sent_ns), ms(written[-1], reply.arrived_ns))]
            if not all(is_near(measured, true) for measured, true in pairs):
                return False
        return True

    def test_first_token_and_gaps(self) -> None:
        assert in_a_quiet_moment(lambda: self.agrees(stream(ttft_s=0.05, gap_s=0.01)))

    def test_ben_07_after_a_role_chunk(self) -> None:
        respond = stream(ttft_s=0.1, gap_s=0.005, role_first=True)
        assert in_a_quiet_moment(lambda: self.agrees(respond, num_before=1))

    def test_stalls(self) -> None:
        respond = stream(ttft_s=0.01, gap_s=0.01, stalls_s={2: 0.08, 4: 0.04})
        assert in_a_quiet_moment(lambda: self.agrees(respond))

    def test_events_that_come_together(self) -> None:
        respond = stream(ttft_s=0.03, gap_s=0.01, chunks_per_write=3)
        assert in_a_quiet_moment(lambda: self.agrees(respond, num_tokens=9))

    def test_ben_03_per_token_time_of_a_reply_that_stopped_early(self) -> None:
        def attempt() -> bool:
            respond = stream(ttft_s=0.01, gap_s=0.05, num_tokens=10, finish_reason="stop")
            run, server = played(respond, planned(max_tokens=100))
            (record,), (reply,) = run.records, server.replies
            assert record.num_output_tokens == 10
            return is_near(tpot_ms(record), ms(reply.writes_ns[9], reply.writes_ns[0]) / 9)

        assert in_a_quiet_moment(attempt)


class TestClosedLoop:
    def test_so_many_at_a_time_and_all_in_the_end(self) -> None:
        run, server = played(stream(ttft_s=0.005), planned(20), concurrency=4)
        assert server.peak == 4
        assert [record.index for record in run.records] == list(range(20))
        assert all(record.is_ok for record in run.records)
        assert len({reply.connection for reply in server.replies}) == 4

    def test_a_request_is_due_when_its_user_becomes_free(self) -> None:
        run, _ = played(stream(ttft_s=0.005), planned(6))
        ends = [record.done_ns for record in run.records]
        assert [record.scheduled_ns for record in run.records] == [run.start_ns, *ends[:-1]]
        assert run.end_ns == ends[-1]

    def test_users_may_begin_one_after_another(self) -> None:
        run, _ = played(stream(ttft_s=0.3), planned(4), concurrency=4, ramp_s=0.2)
        after = [(record.scheduled_ns - run.start_ns) / 1e9 for record in run.records]
        assert after == pytest.approx([0.0, 0.05, 0.1, 0.15])
        assert all(r.sent_ns is not None and r.sent_ns >= r.scheduled_ns for r in run.records)

    def test_fewer_requests_than_users(self) -> None:
        run, server = played(stream(), planned(2), concurrency=5)
        assert (len(run.records), len(server.replies)) == (2, 2)

    def test_ben_13_no_limit_of_the_client_is_in_the_way(self) -> None:
        run, server = played(stream(ttft_s=0.5), planned(300), concurrency=300)
        assert server.peak == 300
        assert all(record.is_ok for record in run.records)

    def test_ben_13_long_prompts_take_little_of_the_client(self) -> None:
        run, server = played(stream(), planned(20, prompt="x" * 1_000_000), concurrency=4)
        assert [len(reply.json["prompt"]) for reply in server.replies] == [1_000_000] * 20
        assert percentile([ms(r.sent_ns, r.scheduled_ns) for r in run.records], 0.5) < 5.0

    def test_a_request_that_takes_too_long_has_failed(self) -> None:
        run, _ = played(
            in_turn(stream(gap_s=30.0), stream()), planned(2), timeout_s=0.1, keep_text=True
        )
        late, next_one = run.records
        assert (late.failure, late.error) == (Failure.TIMEOUT, "no end after 0.1 s")
        assert late.text == " word", "what came is kept"
        assert ms(late.done_ns, late.sent_ns) >= 100
        assert next_one.is_ok

    def test_a_server_that_is_gone(self) -> None:
        target = Target(base_url="http://127.0.0.1:1/v1", model="m")
        point = LoadPoint(label="test", requests=planned(2), concurrency=1)
        run = asyncio.run(play(target, point))
        assert [record.failure for record in run.records] == [Failure.CONNECTION] * 2
        assert run.client.lag_p99_ms == 0.0


class TestOpenLoop:
    def test_requests_are_sent_at_their_times_whatever_the_server_does(self) -> None:
        arrivals = [0.0, 0.05, 0.051, 0.052, 0.1]
        requests = planned(5, arrivals_s=arrivals)
        run, server = played(stream(ttft_s=0.3), requests)
        after = [(record.scheduled_ns - run.start_ns) / 1e9 for record in run.records]
        assert after == pytest.approx(arrivals)
        assert server.peak == 5

    def test_a_late_request_does_not_make_the_next_one_late(self) -> None:
        """The schedule is absolute: gaps are never slept through one after another."""

        def attempt() -> bool:
            arrivals = [0.004 * i for i in range(50)]
            run, _ = played(stream(), planned(50, arrivals_s=arrivals))
            lags = [ms(record.sent_ns, record.scheduled_ns) for record in run.records]
            assert min(lags) >= 0.0
            return min(lags[-10:]) < 2.0  # a millisecond more with each would be fifty by now

        assert in_a_quiet_moment(attempt)

    def test_a_trace_may_come_in_any_order(self) -> None:
        run, _ = played(stream(), planned(3, arrivals_s=[0.04, 0.0, 0.02]))
        assert [record.index for record in run.records] == [0, 1, 2]
        as_sent = sorted(run.records, key=lambda record: record.sent_ns or 0)
        assert [record.index for record in as_sent] == [1, 2, 0]

    def test_54101_latency_counts_from_the_scheduled_time(self) -> None:
        """vLLM #54101: ten requests a second at one that serves two, here 20 times as fast. Each
        waits 20 ms more than the one before. A client that holds requests back until the server is
        free, and counts from when it sends, sees 25 ms whatever the load.
        """
        service_s, gap_s, count = 0.025, 0.005, 20
        arrivals = [gap_s * i for i in range(count)]
        offered, server = played(
            Queue(service_s), planned(count, max_tokens=1, arrivals_s=arrivals)
        )
        held_back, _ = played(Queue(service_s), planned(count, max_tokens=1))
        from_schedule = [ms(r.done_ns, r.scheduled_ns) for r in offered.records]
        from_sending = [ms(r.done_ns, r.sent_ns) for r in held_back.records]

        least = [1e3 * (service_s + (service_s - gap_s) * i) for i in range(count)]
        assert all(e2e >= true for e2e, true in zip(from_schedule, least, strict=True))
        assert percentile(from_schedule, 0.99) >= percentile(least, 0.99) > 400
        assert percentile(from_sending, 0.5) < 200
        written = sorted(reply.writes_ns[-1] for reply in server.replies)
        served = [ms(at, r.scheduled_ns) for at, r in zip(written, offered.records, strict=True)]
        assert percentile(from_schedule, 0.5) >= percentile(served, 0.5)


class TestWorkers:
    def test_processes_share_the_work_and_the_clock(self) -> None:
        done: list[None] = []
        run, server = played(
            stream(ttft_s=0.02),
            planned(20),
            concurrency=5,
            num_workers=2,
            on_done=lambda: done.append(None),
        )
        assert server.peak == 5
        assert [record.index for record in run.records] == list(range(20))
        assert all(record.is_ok for record in run.records)
        assert len(done) == 20
        assert run.client.num_workers == 2
        assert run.client.cpu_share > 0.0
        firsts = sorted(run.records, key=lambda record: record.scheduled_ns)[:5]
        assert {record.scheduled_ns for record in firsts} == {run.start_ns}

    def test_an_open_loop_is_dealt_out(self) -> None:
        arrivals = [0.01 * i for i in range(10)]
        run, _ = played(stream(), planned(10, arrivals_s=arrivals), num_workers=2)
        after = [(record.scheduled_ns - run.start_ns) / 1e9 for record in run.records]
        assert after == pytest.approx(arrivals)

    def test_no_worker_is_without_users(self) -> None:
        run, _ = played(stream(), planned(4), concurrency=1, num_workers=3)
        assert run.client.num_workers == 1
        assert len(run.records) == 4

    def test_a_worker_that_dies_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def hang(reply: Reply) -> None:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            await asyncio.sleep(60)

        with pytest.raises(OctavoError, match="ended too early"):
            played(hang, planned(4), concurrency=4, num_workers=2)

    def test_stopping_reaches_them(self) -> None:
        run = _stopped_after(0.3, planned(50), concurrency=4, num_workers=2)
        assert [record.failure for record in run.records].count(Failure.CANCELLED) == 4


class TestStopping:
    @pytest.mark.parametrize("arrivals_s", [None, [0.001 * i for i in range(3)] + [60.0] * 3])
    def test_requests_in_flight_are_cancelled_later_ones_never_sent(
        self, arrivals_s: list[float] | None
    ) -> None:
        begin = time.monotonic()
        run = _stopped_after(0.1, planned(6, arrivals_s=arrivals_s), concurrency=3)
        assert time.monotonic() - begin < 30
        assert [record.failure for record in run.records] == [Failure.CANCELLED] * 3
        assert all(record.text == " word" for record in run.records), "what came is kept"

    def test_ctrl_c_stops(self) -> None:
        async def run() -> int:
            async with MockServer(stream(gap_s=60.0)) as server, stop_on_interrupt() as stop:
                asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGINT)
                target = Target(base_url=f"{server.url}/v1", model="m")
                point = LoadPoint(label="test", requests=planned(9), concurrency=2)
                return len((await play(target, point, stop=stop)).records)

        assert asyncio.run(run()) == 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_a_cancelled_caller_leaves_nothing_behind(self, num_workers: int) -> None:
        async def run() -> None:
            async with MockServer(stream(gap_s=60.0)) as server:
                target = Target(base_url=f"{server.url}/v1", model="m")
                point = LoadPoint(label="test", requests=planned(9), concurrency=2)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await play(target, point, num_workers=num_workers)
                assert not _children()
                assert len(asyncio.all_tasks()) <= 2 + len(server.replies)

        asyncio.run(run())


class TestWhatElseIsNoted:
    def test_counters_before_and_after_and_gauges_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("octavo.bench.load.generator._GAUGE_SAMPLE_S", 0.02)
        asked = 0

        async def metrics(reply: Reply) -> None:
            nonlocal asked
            asked += 1
            reply.whole(
                200, f"# TYPE vllm:busy gauge\nvllm:busy {asked}\nvllm:steps_total {10 * asked}\n"
            )

        def server(respond: Any) -> MockServer:
            return MockServer(respond, routes={"GET /metrics": metrics})

        run, _ = played(stream(ttft_s=0.2), planned(), server=server)
        assert run.counters_before["steps_total"] == 10
        assert run.counters_after["steps_total"] == 10 * asked
        assert list(run.gauges["busy"]) == list(range(2, asked))
        assert asked > 3

    def test_progress(self) -> None:
        done: list[None] = []
        played(stream(), planned(5), on_done=lambda: done.append(None))
        assert len(done) == 5

    def test_text_is_kept_if_asked_for(self) -> None:
        run, _ = played(stream(), planned(), keep_text=True)
        assert run.records[0].text == " word" * 4
        run, _ = played(stream(), planned())
        assert run.records[0].text is None

    def test_tokens_are_counted_here_where_the_server_does_not(self) -> None:
        respond = in_turn(stream(usage_on="never", tokens_per_chunk=2), stream(tokens_per_chunk=2))
        run, _ = played(respond, planned(2), tokenize=lambda text: [1] * text.count("word"))
        uncounted, counted = run.records
        assert (uncounted.num_output_tokens, uncounted.token_source) == (4, TokenSource.RETOKENIZED)
        assert len(uncounted.chunk_ns) == 2
        assert counted.token_source is TokenSource.USAGE
        assert uncounted.text is None

    def test_a_chat_and_cached_prompts(self) -> None:
        def target(url: str) -> Target:
            return replace(Target(base_url=f"{url}/v1", model="mock"), api="chat")

        run, server = played(stream(role_first=True, num_cached=3), planned(), target=target)
        assert server.replies[0].path == "/v1/chat/completions"
        assert run.records[0].num_cached_tokens == 3
        assert len(run.records[0].chunk_ns) == 4

    def test_a_point_without_requests(self) -> None:
        async def run() -> None:
            async with MockServer(answer("")) as server:
                target = Target(base_url=f"{server.url}/v1", model="m")
                for point in (
                    LoadPoint(label="test", requests=[], concurrency=2),
                    LoadPoint(label="test", requests=[], rate=1.0),
                ):
                    assert (await play(target, point)).records == []

        asyncio.run(run())


def _stopped_after(seconds: float, requests: Any, **options: Any) -> Any:
    """The run of a stream that never ends, stopped by then."""

    async def begin_and_stop() -> Any:
        stop = asyncio.Event()
        async with MockServer(stream(gap_s=60.0)) as server:
            target = Target(base_url=f"{server.url}/v1", model="m")
            concurrency = options.pop("concurrency")
            is_open = requests[0].arrival_s is not None
            point = LoadPoint(
                label="test",
                requests=requests,
                concurrency=None if is_open else concurrency,
                rate=1.0 if is_open else None,
            )
            playing = asyncio.create_task(play(target, point, stop=stop, keep_text=True, **options))
            while len(server.replies) < concurrency:
                await asyncio.sleep(0.01)
            await asyncio.sleep(seconds)
            stop.set()
            return await playing

    return asyncio.run(begin_and_stop())


def _children() -> list[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
