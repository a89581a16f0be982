"""The figures of one load point, and what can be said about their truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; low and high are None where none can be given."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Of one metric at one load point, in the metric's unit. count: values; num_effective: as many
    independent ones would tell as much. A percentile is None where the sample can't carry it.
    """

    count: int
    num_effective: float
    mean: Estimate
    p50: Estimate
    p90: Estimate | None
    p99: Estimate | None


class CheckStatus(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about a run's validity. value, limit: as shown to the user. why: a sentence that
    says what it means and, unless it passed, what to do.
    """

    id: str
    status: CheckStatus
    value: str
    limit: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """One load point, summarized. Rates count what happened inside the window: from the end of the
    ramp to the last arrival (open loop), or to the first user without a next request (closed).

    offered: users of a closed loop, or requests per second of an open one. metrics: by name, see
    bench/metrics.py; absent if no request has the metric. attainment: share of requests that met
    the SLO, None without one; goodput: of these, per second. failures: count by kind.
    little_residual: N / (X R) - 1, of the window. server: what its counters say. slo_met: None
    without an SLO, and where the sample can't tell; binding_term: the limit that decides.
    """

    label: str
    mode: str  # "closed" or "open"
    offered: float
    seed: int
    num_requests: int
    num_ok: int
    num_cancelled: int
    failures: Mapping[str, int]
    window_s: float
    duration_s: float
    request_rate: Estimate
    output_rate: Estimate  # tokens per second
    total_rate: float  # prompt and output tokens per second
    mean_concurrency: float
    little_residual: float
    chunks_per_token: float | None
    num_without_tpot: int
    metrics: Mapping[str, Quantiles]
    attainment: Estimate | None
    goodput: Estimate | None
    goodput_tokens: float | None
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    client_cpu_share: float
    client_lag_p99_ms: float
    server: Mapping[str, float]
    checks: tuple[Check, ...]
    slo_met: bool | None = None
    binding_term: str | None = None

    @property
    def is_valid(self) -> bool:
        return all(check.status is not CheckStatus.FAIL for check in self.checks)
