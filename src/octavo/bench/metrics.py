"""What the measured quantities mean: each with its unit and formula, once. Reports, their legends
and the simulator go over METRICS.

In formulas: a, when the request was due; s, when it was sent; c_1 ... c_m, when its chunks with
output came; k_j, tokens of chunk j; d, when its stream had ended; n, its output tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from octavo.bench.records import RequestRecord
from octavo.bench.statistics import Floats
from octavo.core.step import RequestTimes

_NS_PER_MS = 1e6


def ttft_seconds(times: RequestTimes) -> float | None:
    """Time to first token: from the request's arrival to its first token; None if it got none."""
    return None if times.first_token is None else times.first_token - times.arrival


def tpot_seconds(times: RequestTimes, num_tokens: int) -> float | None:
    """Time per output token after the first: (last token - first token) / (tokens - 1). Undefined
    (None) for fewer than two tokens.
    """
    if times.first_token is None or num_tokens < 2:
        return None
    return (times.finished - times.first_token) / (num_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity that requests have. timed_values: of one request, when each was known (ns) and
    what it is (in `unit`), in this order; none where it is undefined. is_pooled: a request may have
    many, and all requests' values are one sample.
    """

    name: str
    label: str
    unit: str
    formula: str
    meaning: str
    timed_values: Callable[[RequestRecord], Sequence[tuple[int, float]]]
    is_pooled: bool = False

    def values(self, record: RequestRecord) -> list[float]:
        """Empty where it is undefined."""
        return [value for _, value in self.timed_values(record)]

    def sample(self, records: Iterable[RequestRecord]) -> Floats:
        """The values of all requests that succeeded, in order of time."""
        timed = [pair for record in records if record.is_ok for pair in self.timed_values(record)]
        timed.sort(key=lambda pair: pair[0])
        return np.array([value for _, value in timed], dtype=np.float64)


_Values = Sequence[tuple[int, float]]


def _once(value: Callable[[RequestRecord], float | None]) -> Callable[[RequestRecord], _Values]:
    def timed_values(record: RequestRecord) -> _Values:
        found = value(record)
        return () if found is None else ((record.scheduled_ns, found),)

    return timed_values


def _after(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / _NS_PER_MS


def _first_chunk(record: RequestRecord) -> int | None:
    return record.chunk_ns[0] if record.chunk_ns else None


def _tpot(record: RequestRecord) -> float | None:
    if record.num_output_tokens < 2 or len(record.chunk_ns) < 2:
        return None  # all tokens in one chunk have no time between them
    elapsed = record.chunk_ns[-1] - record.chunk_ns[0]
    return elapsed / (record.num_output_tokens - 1) / _NS_PER_MS


def _ttst(record: RequestRecord) -> float | None:
    return _after(*record.chunk_ns[:2]) if len(record.chunk_ns) > 1 else None


def _gaps(record: RequestRecord) -> _Values:
    times = record.chunk_ns
    return [(end, (end - start) / _NS_PER_MS) for start, end in pairwise(times)]


def _gaps_by_token(record: RequestRecord) -> _Values:
    """Each token of a chunk has its part of the gap before it. Where chunks aren't counted, each
    has the request's average.
    """
    gaps = _gaps(record)
    if record.chunk_tokens is None:
        per_chunk = record.num_output_tokens / len(record.chunk_ns) if gaps else 0
        return [(end, gap / per_chunk) for end, gap in gaps] if per_chunk else ()
    timed = []
    waited = 0.0  # also over chunks without a token of their own: text that was held back
    for (end, gap), num_tokens in zip(gaps, record.chunk_tokens[1:], strict=True):
        waited += gap
        if num_tokens > 0:
            timed += [(end, waited / num_tokens)] * num_tokens
            waited = 0.0
    return timed


def _max_stall(record: RequestRecord) -> float | None:
    return max((gap for _, gap in _gaps(record)), default=None)


def _ntpot(record: RequestRecord) -> float | None:
    elapsed = _after(record.scheduled_ns, record.done_ns)
    return elapsed / record.num_output_tokens if elapsed and record.num_output_tokens else None


def _input_length(record: RequestRecord) -> float:
    known = record.num_prompt_tokens
    return record.prompt_len if known is None else known


_METRICS = (
    Metric(
        name="ttft",
        label="TTFT",
        unit="ms",
        formula="c_1 - a",
        meaning="Time to first token, from when the request was due: a client or a queue that is "
        "late does not hide it. In a closed loop, due is when its user became free.",
        timed_values=_once(lambda r: _after(r.scheduled_ns, _first_chunk(r))),
    ),
    Metric(
        name="ttft_send",
        label="TTFT (from sending)",
        unit="ms",
        formula="c_1 - s",
        meaning="Time to first token, from when the request was sent.",
        timed_values=_once(lambda r: _after(r.sent_ns, _first_chunk(r))),
    ),
    Metric(
        name="tpot",
        label="TPOT",
        unit="ms",
        formula="(c_m - c_1) / (n - 1)",
        meaning="Time per output token after the first. Undefined for fewer than two tokens, or "
        "where all came in one chunk: such requests are left out, and counted.",
        timed_values=_once(_tpot),
    ),
    Metric(
        name="ttst",
        label="TTST",
        unit="ms",
        formula="c_2 - c_1",
        meaning="Time to second token: the first gap, where other prompts' prefills get in.",
        timed_values=_once(_ttst),
    ),
    Metric(
        name="itl",
        label="ITL",
        unit="ms",
        formula="c_j - c_(j-1), of all chunks of all requests",
        meaning="Inter-token latency as it arrives: the gaps between chunks, whatever these hold.",
        timed_values=_gaps,
        is_pooled=True,
    ),
    Metric(
        name="itl_token",
        label="ITL per token",
        unit="ms",
        formula="(c_j - c_(j-1)) / k_j, once for each of the k_j tokens",
        meaning="The gaps shared out among the tokens of a chunk. Where the server doesn't count "
        "these, k_j is the request's tokens per chunk, n / m.",
        timed_values=_gaps_by_token,
        is_pooled=True,
    ),
    Metric(
        name="max_stall",
        label="longest stall",
        unit="ms",
        formula="max_j (c_j - c_(j-1))",
        meaning="A request's longest gap: a freeze that its reader sees.",
        timed_values=_once(_max_stall),
    ),
    Metric(
        name="e2e",
        label="E2E",
        unit="ms",
        formula="d - a",
        meaning="End-to-end latency, from when the request was due to the end of its stream.",
        timed_values=_once(lambda r: _after(r.scheduled_ns, r.done_ns)),
    ),
    Metric(
        name="e2e_send",
        label="E2E (from sending)",
        unit="ms",
        formula="d - s",
        meaning="End-to-end latency, from when the request was sent.",
        timed_values=_once(lambda r: _after(r.sent_ns, r.done_ns)),
    ),
    Metric(
        name="ntpot",
        label="normalized latency",
        unit="ms",
        formula="(d - a) / n",
        meaning="End-to-end latency per output token: what the Orca and vLLM papers plot.",
        timed_values=_once(_ntpot),
    ),
    Metric(
        name="output_length",
        label="output length",
        unit="tokens",
        formula="n",
        meaning="Output tokens, as the server's usage says, else counted here.",
        timed_values=_once(lambda r: r.num_output_tokens),
    ),
    Metric(
        name="input_length",
        label="input length",
        unit="tokens",
        formula="prompt tokens",
        meaning="Prompt tokens, as the server's usage says, else as planned.",
        timed_values=_once(_input_length),
    ),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _METRICS}
"""By name, in the order in which reports show them."""
