"""The steady part of a run, and how many requests were in flight."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.bench.load.plan import PointRun
from octavo.bench.records import RequestRecord
from octavo.bench.statistics import Floats

_LONGEST_RAMP = 0.5
"""Share of the arrivals' time."""
_LEAST_DUE = 10
_LEAST_DUE_OF_ALL = 1 / 3


@dataclass(frozen=True)
class Window:
    """Both ends inclusive, in the records' clock. is_steady: False where the run was too short to
    have a steady part.
    """

    start_ns: int
    end_ns: int
    is_steady: bool = True

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def was_due_within(self, record: RequestRecord) -> bool:
        return self.start_ns <= record.scheduled_ns <= self.end_ns

    def edges(self, num_parts: int) -> Floats:
        """Of equal parts: num_parts + 1 times, in ns."""
        return np.linspace(self.start_ns, self.end_ns, num_parts + 1)


def steady_window(run: PointRun) -> Window:
    """The time for which rates are counted; requests due in it are those that other figures are of.

    In an open loop: from the end of the ramp, for which the first requests find an empty server (as
    long as the median request takes, at most half of the arrivals' time), to the last arrival.
    In a closed loop: from when all users have a request in flight to when the first of them gets no
    next one. Both leave out the drain, in which fewer and fewer requests run. Where fewer than
    10 requests are due within, or less than a third, it is the whole run.
    """
    first = min(record.scheduled_ns for record in run.records)
    whole = Window(first, max(first + 1, *map(end_ns, run.records)), is_steady=False)
    users = run.point.concurrency
    window = _open_window(run.records) if users is None else _closed_window(run.records, users)
    num_within = sum(map(window.was_due_within, run.records))
    least = max(_LEAST_DUE, _LEAST_DUE_OF_ALL * len(run.records))
    return window if window.start_ns < window.end_ns and num_within >= least else whole


def end_ns(record: RequestRecord) -> int:
    """When the request was over, as far as its client could see."""
    if record.done_ns is not None:
        return record.done_ns
    known = [record.scheduled_ns, *record.chunk_ns[-1:]]
    return max(known + [ns for ns in (record.sent_ns, record.headers_ns) if ns is not None])


def in_flight(records: Iterable[RequestRecord], times_ns: Floats) -> Floats:
    """How many requests had been sent and weren't over, at each time."""
    sent = [record for record in records if record.sent_ns is not None]
    starts = np.sort([record.sent_ns or 0 for record in sent])
    ends = np.sort([end_ns(record) for record in sent])
    begun = np.searchsorted(starts, times_ns, side="right")
    return (begun - np.searchsorted(ends, times_ns, side="right")).astype(np.float64)


def _open_window(records: Sequence[RequestRecord]) -> Window:
    due = [record.scheduled_ns for record in records]
    first, last = min(due), max(due)
    took = [end_ns(record) - record.scheduled_ns for record in records if record.is_ok]
    ramp = statistics.median(took) if took else 0
    longest = _LONGEST_RAMP * (last - first)
    return Window(first + round(min(ramp, longest)), last, is_steady=ramp <= longest)


def _closed_window(records: Sequence[RequestRecord], users: int) -> Window:
    begins = np.sort([record.scheduled_ns for record in records])
    ends = np.sort([end_ns(record) for record in records])
    busy = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")
    start = begins[np.argmax(busy >= min(users, int(busy.max())))]
    without_next = ends[ends > begins[-1]]
    return Window(int(start), int(without_next[0] if len(without_next) else ends[-1]))
