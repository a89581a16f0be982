"""Summarized load points, made up."""

from __future__ import annotations

from typing import Any

from octavo.bench.points import Estimate, Point

OUTPUT_LEN = 50.0


def closed_point(users: float, output_rate: float, **changes: Any) -> Point:
    return _point("closed", users, output_rate, **changes)


def open_point(rate: float, output_rate: float, **changes: Any) -> Point:
    return _point("open", rate, output_rate, **changes)


def _point(
    mode: str, offered: float, output_rate: float, half: float | None = None, **changes: Any
) -> Point:
    """half: of the output rate's interval."""
    bounds = (None, None) if half is None else (output_rate - half, output_rate + half)
    values: dict[str, Any] = {
        "label": f"{mode} {offered:g}",
        "mode": mode,
        "offered": offered,
        "seed": 0,
        "num_requests": 100,
        "num_ok": 100,
        "num_cancelled": 0,
        "failures": {},
        "window_s": 10.0,
        "duration_s": 12.0,
        "request_rate": Estimate(output_rate / OUTPUT_LEN),
        "output_rate": Estimate(output_rate, *bounds),
        "total_rate": 2 * output_rate,
        "mean_concurrency": offered,
        "little_residual": 0.0,
        "chunks_per_token": 1.0,
        "num_without_tpot": 0,
        "metrics": {},
        "attainment": None,
        "goodput": None,
        "goodput_tokens": None,
        "num_prompt_tokens": 5000,
        "num_cached_tokens": 0,
        "num_output_tokens": 5000,
        "client_cpu_share": 0.1,
        "client_lag_p99_ms": 1.0,
        "server": {},
        "checks": (),
    }
    return Point(**values | changes)
