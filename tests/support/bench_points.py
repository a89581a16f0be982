"""Points and runs of a made-up sweep, for what shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.bench.output.run import ClientMachine, Clock, Run, Served, WorkloadInfo
from octavo.bench.points import Check, CheckStatus, Estimate, Point, Quantiles


def estimate(value: float) -> Estimate:
    return Estimate(value, 0.96 * value, 1.05 * value)


def quantiles(median: float, *, count: int = 600) -> Quantiles:
    return Quantiles(
        count=count,
        num_effective=float(count),
        mean=estimate(1.1 * median),
        p50=estimate(median),
        p90=estimate(1.6 * median) if count >= 30 else None,
        p99=estimate(2.4 * median) if count >= 300 else None,
    )


def closed_point(users: float, **changes: Any) -> Point:
    """With throughput that saturates at 500 tokens/s."""
    rate = 500 * users / (users + 9)
    tpot = 1000 * users / rate
    point = Point(
        label=f"{users:g} users",
        mode="closed",
        offered=float(users),
        seed=0,
        num_requests=600,
        num_ok=600,
        num_cancelled=0,
        failures={},
        window_s=58.0,
        duration_s=61.0,
        request_rate=estimate(rate / 45),
        output_rate=estimate(rate),
        total_rate=3 * rate,
        mean_concurrency=float(users),
        little_residual=0.01,
        chunks_per_token=1.0,
        num_without_tpot=0,
        metrics={
            "ttft": quantiles(4 * tpot),
            "tpot": quantiles(tpot),
            "itl": quantiles(tpot, count=9000),
            "e2e": quantiles(48 * tpot),
        },
        attainment=None,
        goodput=None,
        goodput_tokens=None,
        num_prompt_tokens=60_000,
        num_cached_tokens=0,
        num_output_tokens=27_000,
        client_cpu_share=0.07,
        client_lag_p99_ms=0.4,
        server={},
        checks=(check("little"), check("client_lag")),
    )
    return replace(point, **changes)


def open_point(rate: float, **changes: Any) -> Point:
    """An open loop; everything is within the SLO up to 8 requests/s."""
    share = min(1.0, 8 / rate)
    return closed_point(
        rate,
        **{
            "mode": "open",
            "label": f"{rate:g}/s",
            "request_rate": estimate(float(rate)),
            "attainment": Estimate(share, 0.9 * share, min(1.0, 1.02 * share)),
            "goodput": estimate(rate * share),
            **changes,
        },
    )


def check(id_: str, status: CheckStatus = CheckStatus.PASS, why: str = "as it should be") -> Check:
    return Check(id=id_, status=status, value="1.2 %", limit="5 %", why=why)


def run_of(*points: Point, **changes: Any) -> Run:
    run = Run(
        started_at="2026-11-30T05:15:00+00:00",
        command="octavo bench sweep http://127.0.0.1:8000 --concurrency 1,2,4",
        served=Served(
            base_url="http://127.0.0.1:8000/v1",
            model="SmolLM2-135M-Instruct",
            api="completions",
            engine="octavo",
            version="0.1.0",
            sampling={"temperature": 0},
        ),
        workload=WorkloadInfo(description="mixed: as it comes, 1/8 as long", sha256="5e" * 32),
        seeds=(0,),
        points=points,
        client=ClientMachine(
            processor="a processor",
            usable_cpus=2,
            cpu_quota=None,
            memory_limit_bytes=8 * 2**30,
            system="Linux",
            python="3.11.7",
        ),
        clock=Clock(monotonic_ns=5, unix_ns=10**18, resolution_ns=1),
        git_revision=None,
    )
    return replace(run, **changes)
