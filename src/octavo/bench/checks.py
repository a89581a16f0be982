"""Whether a run can be believed: each gate asks one question, and says what to do.

A run is valid if none fails. A gate that has nothing to go by isn't among a point's checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from octavo.bench.load.plan import ClientLoad, PointRun
from octavo.bench.metrics import METRICS
from octavo.bench.points import Check, CheckStatus, Estimate, Point, Quantiles
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.statistics import is_rising
from octavo.bench.window import Window, in_flight, steady_window
from octavo.bench.workloads.prefix_cache import CacheHits, cache_hits
from octavo.machine import usable_cpus

PASS, WARN, FAIL = CheckStatus.PASS, CheckStatus.WARN, CheckStatus.FAIL

_LAG_MS, _LAG_OF_TTFT = 5.0, 0.02  # whichever is more
_BUSY_WORKER = 0.9  # of a core
_CLIENT_OF_MACHINE = 0.1
_HEADROOM = 2.0
_LITTLE = 0.05
_REQUESTS_PER_USER = 10  # below, the first and last wave are too much of a closed loop
_TEXTS_COMPARED = 20
_TOKENS_WARN, _TOKENS_FAIL = 0.05, 0.2  # text that is tokenized again differs a little
_CHUNKS_PER_TOKEN = (0.95, 1.05)
_HITS_WARN, _HITS_FAIL = 0.05, 0.2
_LEAST_FOR_TREND = 20  # requests
_TREND_PARTS = 40  # of the window, in which requests in flight are counted
_FAILURES = 0.05
_DRIFT = 0.05


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What gates need beside a run; None where it isn't known.

    client_chunks_per_s: that this client, all workers together, could take from a server that does
    nothing. count_tokens: of a text, by the model's tokenizer. may_overload: the load is meant to
    go beyond what the server can do, as in a search for its capacity; requests that pile up or are
    turned away are then a finding. num_cpus: of the client's machine.
    """

    client_chunks_per_s: float | None = None
    count_tokens: Callable[[str], int] | None = None
    may_overload: bool = False
    num_cpus: int = field(default_factory=usable_cpus)


def check_point(run: PointRun, point: Point, evidence: Evidence) -> tuple[Check, ...]:
    """All gates that apply to one load point."""
    succeeded = [record for record in run.records if record.is_ok]
    found: list[Check | None] = [
        client_lag(point, run.client),
        client_cpu(point, run.client.num_workers, evidence.num_cpus),
        self_test(run, evidence.client_chunks_per_s),
        little(point),
        stationarity(run, may_overload=evidence.may_overload),
        failures(point, may_overload=evidence.may_overload),
        token_count(succeeded, evidence.count_tokens),
        output_length(succeeded),
        prompt_length(succeeded),
        chunks_per_token(point),
        prefix_cache(cache_hits(run.point.requests, run.records, _hit_rate(point))),
        sample_size(point),
    ]
    return tuple(check for check in found if check is not None)


def client_lag(point: Point, client: ClientLoad) -> Check:
    """Requests left when they were due, and what came was stamped when it came."""
    ttft = point.metrics.get("ttft_send")  # the one from the schedule has the lag in it
    limit = max(_LAG_MS, _LAG_OF_TTFT * ttft.p50.value if ttft else 0.0)
    if client.lag_p99_ms >= limit:
        status = FAIL
        why = "The client sent requests late: the server saw another load than was asked for. Use "
        why += "more workers, or a machine that is less busy."
    elif client.loop_lag_p99_ms >= limit:
        status = WARN
        why = "The client was busy when it should have looked: stamps of chunks may be late by as "
        why += "much. Use more workers, or a machine that is less busy."
    else:
        status, why = PASS, "The client was on time."
    return Check(
        id="client_lag",
        status=status,
        value=f"p99 {client.lag_p99_ms:.1f} ms in sending, {client.loop_lag_p99_ms:.1f} ms in "
        "looking",
        limit=f"< {limit:.1f} ms",
        why=why,
    )


def client_cpu(point: Point, num_workers: int, num_cpus: int) -> Check:
    """The client had processor time to spare, and took little from a server beside it."""
    share = point.client_cpu_share / num_workers
    of_machine = point.client_cpu_share / num_cpus
    if share >= _BUSY_WORKER:
        status = FAIL
        why = "The client's processes had no time to spare: what they measured is their own limit. "
        why += "Use more workers."
    elif of_machine > _CLIENT_OF_MACHINE:
        status = WARN
        why = f"The client took {of_machine:.0%} of this machine. A server that runs on it, too, "
        why += "was slowed by about as much: measure from another machine."
    else:
        status, why = PASS, "The client had time to spare."
    return Check(
        id="client_cpu",
        status=status,
        value=f"{share:.0%} of a core a worker, {num_workers} of them, {num_cpus} cores",
        limit=f"< {_BUSY_WORKER:.0%}; all < {_CLIENT_OF_MACHINE:.0%} of the machine",
        why=why,
    )


def self_test(run: PointRun, client_chunks_per_s: float | None) -> Check | None:
    """The client could have taken more than it was given."""
    if client_chunks_per_s is None:
        return None
    window = steady_window(run)
    times = [ns for record in run.records for ns in record.chunk_ns]
    rate = sum(window.start_ns <= ns <= window.end_ns for ns in times) / window.seconds
    has_headroom = client_chunks_per_s >= _HEADROOM * rate
    return Check(
        id="self_test",
        status=PASS if has_headroom else FAIL,
        value=f"{client_chunks_per_s:.0f} chunks/s possible, {rate:.0f} in this run",
        limit=f">= {_HEADROOM:g} times the run's",
        why="The client can take more than the server gave."
        if has_headroom
        else "Against a server that does nothing, this client hardly takes more than in this run: "
        "it may be the limit. Use more workers.",
    )


def little(point: Point) -> Check | None:
    """Closed loop: users = throughput times latency, as it must be if all users always wait. It is
    so on average: mean latency is known no better than its interval.
    """
    if point.mode != "closed":
        return None
    limit = max(_LITTLE, _relative_error(point.metrics.get("e2e_send")))
    expected = point.mean_concurrency / (1 + point.little_residual)
    deviation = expected / point.offered - 1
    ended = point.request_rate.value * point.window_s
    if abs(deviation) <= limit:
        status = PASS
        why = "Throughput times latency is the number of users."
    elif ended < _REQUESTS_PER_USER * point.offered:
        status = WARN
        why = f"With less than {_REQUESTS_PER_USER} requests a user, the run is too short to tell. "
        why += "Send more."
    else:
        status = FAIL
        why = "Users weren't always waiting for an answer, or times are wrong: something between "
        why += "them and the server held requests back."
    return Check(
        id="little",
        status=status,
        value=f"X R = {expected:.2f}, {deviation:+.1%}",
        limit=f"{point.offered:g} ± {limit:.0%}",
        why=why,
    )


def _relative_error(metric: Quantiles | None) -> float:
    """Half of the mean's interval, as a share of it."""
    if metric is None or metric.mean.low is None or not metric.mean.value:
        return 0.0
    return 1 - metric.mean.low / metric.mean.value


def stationarity(run: PointRun, *, may_overload: bool) -> Check | None:
    """Open loop: requests don't pile up. The test of GuideLLM's over-saturation detection: requests
    in flight and the time to first token both rise significantly.
    """
    if not run.point.is_open:
        return None
    records = sorted(run.records, key=lambda record: record.scheduled_ns)
    window = steady_window(run)
    if not window.is_steady:  # what fills an empty server is no sign of overload, a late answer is
        window = Window(records[0].scheduled_ns, records[-1].scheduled_ns, is_steady=False)
    first_tokens = [
        pair
        for record in records
        if record.is_ok and window.was_due_within(record)
        for pair in METRICS["ttft"].timed_values(record)
    ]
    if len(first_tokens) < _LEAST_FOR_TREND:
        return None
    edges = window.edges(_TREND_PARTS)
    middles = (edges[1:] + edges[:-1]) / 2
    concurrency = in_flight(records, middles)
    ttft_rises = is_rising(*np.array(first_tokens).T)
    is_overloaded = ttft_rises and is_rising(middles, concurrency)
    if is_overloaded:
        word, status = "overloaded", WARN if may_overload else FAIL
        why = "Requests come faster than they are answered: latencies are those of a queue that "
        why += "grows, and depend on how long the run was. Lower the rate."
    elif not window.is_steady:
        word, status = "too short", WARN
        why = "Requests take longer than half of the time in which they came: the load was still "
        why += "growing when the last one came. Send more, for longer."
    else:
        word, status, why = "steady", PASS, "The load didn't pile up."
    tenth = _TREND_PARTS // 10
    return Check(
        id="stationarity",
        status=status,
        value=f"{word}: from {concurrency[:tenth].mean():.1f} to "
        f"{concurrency[-tenth:].mean():.1f} in flight",
        limit="in flight and TTFT don't both rise",
        why=why,
    )


def failures(point: Point, *, may_overload: bool) -> Check:
    """Requests got answers."""
    counted = point.num_requests - point.num_cancelled
    num_failed = sum(point.failures.values())
    num_serious = num_failed
    if may_overload:
        num_serious -= point.failures.get(str(Failure.OVERLOADED), 0)
    share = num_failed / counted if counted else 0.0
    if num_failed == 0:
        status, why = PASS, "All requests were answered."
    elif counted and num_serious / counted > _FAILURES:
        status = FAIL
        why = "Too many requests failed: throughput and latency are of those that are left. See "
        why += "`error` in requests.jsonl."
    else:
        status = WARN
        why = "Failed requests have no latency; goodput and SLOs count them as missed."
    kinds = ", ".join(f"{count} {kind}" for kind, count in point.failures.items())
    return Check(
        id="failures",
        status=status,
        value=f"{share:.1%} of {counted}" + (f": {kinds}" if kinds else ""),
        limit=f"<= {_FAILURES:.0%}",
        why=why,
    )


def token_count(
    succeeded: list[RequestRecord], count_tokens: Callable[[str], int] | None
) -> Check | None:
    """The server's token counts are of the tokenizer that is expected."""
    if not succeeded:
        return None
    uncounted = sum(record.token_source is not TokenSource.USAGE for record in succeeded)
    if uncounted:
        return Check(
            id="token_count",
            status=WARN,
            value=f"{uncounted} of {len(succeeded)} answers without usage",
            limit="usage in every answer",
            why="Where the server doesn't count tokens they are counted here, from the text or as "
            "one a chunk: rates and times per token may be off.",
        )
    texts = [record for record in succeeded if record.text][:_TEXTS_COMPARED]
    if count_tokens is None or not texts:
        return None
    told = sum(record.num_output_tokens for record in texts)
    counted = sum(count_tokens(record.text or "") for record in texts)
    deviation = counted / told - 1 if told else 0.0
    status = _graded(abs(deviation), _TOKENS_WARN, _TOKENS_FAIL)
    return Check(
        id="token_count",
        status=status,
        value=f"{deviation:+.1%} in {len(texts)} answers",
        limit=f"± {_TOKENS_WARN:.0%} (fails at {_TOKENS_FAIL:.0%})",
        why="The server's counts agree with the tokenizer's."
        if status is PASS
        else "The server counts other tokens than the model's tokenizer finds in the text: is the "
        "model right? Figures per token can't be compared with other servers'.",
    )


def output_length(succeeded: list[RequestRecord]) -> Check | None:
    """Forced lengths were kept, so that all engines do the same work."""
    forced = [record for record in succeeded if record.is_forced]
    if not forced:
        return None
    told = [record for record in forced if record.token_source is TokenSource.USAGE]
    wrong = [record for record in told if record.num_output_tokens != record.max_tokens]
    if wrong:
        status = FAIL
        why = "Answers haven't the lengths that were asked for: the server did other work. It may "
        why += "not know ignore_eos or min_tokens; measure without forced lengths."
    elif len(told) < len(forced):
        status, why = WARN, "Without usage, lengths can't be verified."
    else:
        status, why = PASS, "Every answer has the length that was asked for."
    value = f"{len(wrong)} of {len(told)} differ"
    if wrong:
        value += f", e.g. {wrong[0].num_output_tokens} instead of {wrong[0].max_tokens}"
    return Check(id="output_length", status=status, value=value, limit="0 differ", why=why)


def prompt_length(succeeded: list[RequestRecord]) -> Check | None:
    """Prompts have the planned tokens, and what the server adds is the same each time."""
    extras = [
        record.num_prompt_tokens - record.prompt_len
        for record in succeeded
        if record.num_prompt_tokens is not None
    ]
    if not extras:
        return None
    low, high = min(extras), max(extras)
    is_same = low == high
    return Check(
        id="prompt_length",
        status=PASS if is_same else WARN,
        value=f"{low:+d} tokens each" if is_same else f"{low:+d} to {high:+d} tokens",
        limit="the same for all",
        why="Prompts have the planned lengths, but for what the server adds to each."
        if is_same
        else "Prompts are longer or shorter than planned; lengths in this report are the server's.",
    )


def chunks_per_token(point: Point) -> Check | None:
    """A chunk is a token, so gaps between chunks are those between tokens."""
    if point.chunks_per_token is None or "acceptance" in point.server:
        return None  # speculation gives several tokens at once
    low, high = _CHUNKS_PER_TOKEN
    is_one = low <= point.chunks_per_token <= high
    return Check(
        id="chunks_per_token",
        status=PASS if is_one else WARN,
        value=f"{point.chunks_per_token:.3f}",
        limit=f"{low:g} to {high:g}",
        why="A chunk is a token."
        if is_one
        else "Chunks aren't tokens: the server or something before it collects or splits them. "
        "ITL is of chunks; compare `itl_token`.",
    )


def prefix_cache(hits: CacheHits | None) -> Check | None:
    """Prompts were answered from the prefix cache as far as the workload means them to be."""
    if hits is None:
        return None
    status = _graded(hits.unintended, _HITS_WARN, _HITS_FAIL)
    if status is not PASS:
        why = "The server knew prompts that this workload does not repeat, from an earlier run or "
        why += "another client, and prefill looks too fast. Restart the server or empty its cache."
    elif hits.achieved < hits.intended / 2 and hits.intended > _HITS_WARN:
        status = WARN
        why = "Less than half of what prompts share was found in the prefix cache: it is off, or "
        why += "too small."
    else:
        why = "The prefix cache did what the workload means it to."
    return Check(
        id="prefix_cache",
        status=status,
        value=f"{hits.achieved:.1%} of prompt tokens cached, {hits.intended:.1%} meant, "
        f"{hits.unintended:.1%} neither meant nor a chat template's",
        limit=f"at most {_HITS_WARN:.0%} of these (fails at {_HITS_FAIL:.0%})",
        why=why,
    )


def sample_size(point: Point) -> Check | None:
    """The sample carries its tail."""
    ttft = point.metrics.get("ttft")
    if ttft is None:
        return None
    is_enough = ttft.p99 is not None
    return Check(
        id="sample_size",
        status=PASS if is_enough else WARN,
        value=f"{ttft.count} requests, as good as {ttft.num_effective:.0f} independent ones",
        limit=">= 300 for p99, >= 30 for p90",
        why="There are enough requests for a p99."
        if is_enough
        else "A p99 of so few requests would be the largest value seen: it isn't given. Send more.",
    )


def drift(first: Point, repeat: Point) -> Check | None:
    """A sweep's first point, measured again at its end, is the same. None if nothing succeeded."""
    pairs = list(_compared(first, repeat))
    if not pairs:
        return None
    name, before, after = max(pairs, key=lambda pair: abs(pair[2].value / pair[1].value - 1))
    deviation = after.value / before.value - 1
    if abs(deviation) <= _DRIFT:
        status, why = PASS, "The first point came out the same at the end."
    elif _overlap(before, after):
        status = WARN
        why = "The first point came out differently at the end, by no more than its own intervals "
        why += "allow. Send more requests a point."
    else:
        status = FAIL
        why = "The machine or the server changed during the sweep: its points can't be compared. "
        why += "Look for heat, other load, or memory that fills."
    return Check(
        id="drift",
        status=status,
        value=f"{name} {deviation:+.1%}",
        limit=f"± {_DRIFT:.0%}",
        why=why,
    )


def _compared(first: Point, repeat: Point) -> Iterator[tuple[str, Estimate, Estimate]]:
    """In an open loop the rate is the arrivals', whatever the server does."""
    if first.output_rate.value:
        yield "output tokens/s", first.output_rate, repeat.output_rate
    if "e2e" in first.metrics and "e2e" in repeat.metrics:
        yield "mean E2E", first.metrics["e2e"].mean, repeat.metrics["e2e"].mean


def _overlap(one: Estimate, other: Estimate) -> bool:
    """True also where an interval is unknown."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return True
    return one.low <= other.high and other.low <= one.high


def _hit_rate(point: Point) -> float | None:
    """By the server's counters."""
    return point.server.get("prefix_hit_rate")


def _graded(deviation: float, warn: float, fail: float) -> CheckStatus:
    return FAIL if deviation > fail else WARN if deviation > warn else PASS
