"""How measurements are shown: tables for people, and JSON with vLLM's keys where it has them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from octavo.bench.statistics import Spread, percentile

if TYPE_CHECKING:
    from octavo.bench.determinism import Certificate
    from octavo.bench.offline import LatencyReport, ThroughputReport
    from octavo.bench.op_times import OpTime
    from octavo.bench.profile import Profile, StepProfile
    from octavo.bench.startup import StartupReport
    from octavo.ops.native.limits import Limits

_WIDTH_OF_FILES = 160
"""Columns where the output is no terminal."""

_GIGA = 1e9


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def show_latency(report: LatencyReport, *, as_json: bool) -> None:
    latencies = report.latencies_s
    if as_json:
        print_json(
            {
                "model_id": report.settings["model"],
                "avg_latency": sum(latencies) / len(latencies),
                "latencies": latencies,
                "percentiles": {q: percentile(latencies, int(q) / 100) for q in ("25", "50", "75")},
                "output_tokens_per_second": report.output_tokens_per_second,
                **asdict(report),
            }
        )
        return
    _show_settings(report.settings)
    print(
        f"\n{len(latencies)} times {report.batch_size} prompts of {report.input_len} tokens, "
        f"{report.output_len} output tokens each\n"
    )
    table = _table("", "median", "mean", "lowest", "highest", "p90", "p99")
    _add_spread(table, "latency of the batch (s)", Spread.of(latencies), 3)
    _add_spread(table, "time to first token (ms)", report.ttft_ms, 1)
    _add_spread(table, "time per output token (ms)", report.tpot_ms, 2)
    _print(table)
    print(f"\noutput tokens/s  {report.output_tokens_per_second:.1f}, prefill included")
    _warn_of_cached(report.num_cached_tokens)


def show_throughput(report: ThroughputReport, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "model_id": report.settings["model"],
                "elapsed_time": report.elapsed_s,
                "num_requests": report.num_requests,
                "total_num_tokens": report.num_prompt_tokens + report.num_output_tokens,
                "requests_per_second": report.requests_per_second,
                "tokens_per_second": report.tokens_per_second,
                "output_tokens_per_second": report.output_tokens_per_second,
                **asdict(report),
            }
        )
        return
    _show_settings(report.settings)
    print(
        f"\n{report.num_requests} requests at once: {report.num_prompt_tokens} prompt tokens, "
        f"{report.num_output_tokens} output tokens, in {report.elapsed_s:.2f} s and "
        f"{report.num_steps} steps, {report.num_preemptions} preemptions\n"
    )
    table = _table("", "per second")
    table.add_row("output tokens", f"{report.output_tokens_per_second:.1f}")
    table.add_row("prompt and output tokens", f"{report.tokens_per_second:.1f}")
    table.add_row("requests", f"{report.requests_per_second:.2f}")
    _print(table)
    _warn_of_cached(report.num_cached_tokens)


def show_ops(limits: Limits, times: Sequence[OpTime], *, as_json: bool) -> None:
    if as_json:
        print_json({"limits": asdict(limits), "ops": [asdict(one) for one in times]})
        return
    _show_limits(limits)
    table = _table(
        "op", "shape", "what", "format", "rows", "kernels", "best µs", "median", "GB/s", "GOP/s",
        "share", "of", texts=("op", "shape", "what", "format", "kernels", "of"),
    )  # fmt: skip
    previous = None
    for one in times:
        case = (one.op, one.shape, one.detail, one.format, one.rows)
        if previous is not None and case[:4] != previous[:4]:
            table.add_row()
        previous = case
        table.add_row(
            one.op,
            one.shape,
            one.detail,
            one.format,
            str(one.rows),
            one.implementation,
            f"{one.best_us:.1f}",
            f"{one.median_us:.1f}",
            _per_second(one.bytes_per_second),
            _per_second(one.operations_per_second),
            _percent(one.share),
            one.bound or "",
        )
    print()
    _print(table)
    print(
        "\nshare: of what the limits allow an instruction set, the memory's or its own peak; the "
        "best\nround counts, in both. Bytes that are in caches have none. The memory's limit is"
        " for reads:\na line that is written to is mostly read first, so it moves twice."
    )


def show_profile(profile: Profile, *, as_json: bool) -> None:
    if as_json:
        steps = [
            asdict(step)
            | {
                "seconds": step.seconds,
                "num_bytes": step.num_bytes,
                "bandwidth_share": step.bandwidth_share,
                "roofline_share": step.roofline_share,
                "other_share": step.other_share,
            }
            for step in profile.steps
        ]
        settings = profile.settings
        print_json({"settings": settings, "limits": asdict(profile.limits), "steps": steps})
        return
    _show_settings(profile.settings)
    print()
    _show_limits(profile.limits)
    for step in profile.steps:
        print()
        _show_step(step)


def _show_step(step: StepProfile) -> None:
    ms = 1000 * step.seconds
    if step.name == "decode":
        print(
            f"decode: {ms:.2f} ms a step of {_counted(step.num_sequences, 'sequence')}, "
            f"{step.num_tokens / step.seconds:.0f} tokens/s, up to {step.context} tokens of context"
        )
    else:
        print(
            f"prefill: {ms:.2f} ms for a prompt of {step.context} tokens, "
            f"{step.num_tokens / step.seconds:.0f} tokens/s"
        )
    table = _table(
        "kind", "what", "times", "ms", "of step", "MB", "GB/s", "GOP/s", "of limits",
        texts=("kind", "what"),
    )  # fmt: skip
    kind = None
    for part in step.parts:
        if kind not in (None, part.kind):
            table.add_row()
        kind = part.kind
        least = part.least_seconds
        table.add_row(
            part.kind,
            part.name,
            f"{part.count:.0f}",
            f"{1000 * part.seconds:.3f}",
            f"{part.seconds / step.seconds:.1%}",
            f"{part.num_bytes / 1e6:.1f}" if part.num_bytes else "",
            _per_second(part.num_bytes / part.seconds) if part.seconds else "",
            _per_second(part.operations / part.seconds) if part.seconds else "",
            _percent(None if least is None or not part.seconds else least / part.seconds),
        )
    _print(table)
    other = step.other_share
    if other is not None:
        print(f"neither matrix product nor attention: {other:.1%} of the step")
        print(
            f"the step is at {step.roofline_share:.0%} of what the limits allow its products and "
            f"attention; reading its {step.num_bytes / 1e6:.1f} MB would take "
            f"{step.bandwidth_share:.0%} of its time"
        )


def show_startup(report: StartupReport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report) | _startup_keys(report))
        return
    print(f"{report.command}\n")
    table = _table("", "median", "mean", "lowest", "highest", "p90", "p99")
    for phase, starts in (("cold", report.cold), ("warm", report.warm)):
        ready = Spread.of(start.ready_s for start in starts)
        _add_spread(table, f"{phase} start to listening (s)", ready, 3)
        first_token = Spread.of(start.first_token_s for start in starts)
        _add_spread(table, f"{phase} start to first token (s)", first_token, 3)
    _print(table)
    if report.cold:
        forgotten = ", and the model's files not in memory" if report.was_evicted else ""
        print(f"\ncold: nothing kept by an earlier start{forgotten}")


def _startup_keys(report: StartupReport) -> dict[str, Any]:
    """vLLM's, and the same for the first token. What takes as long as a start in vLLM, loading and
    compiling, has passed when the server listens.
    """
    keys: dict[str, Any] = {"model_id": report.model}
    for phase, starts in (("cold", report.cold), ("warm", report.warm)):
        for what, values in (
            ("startup", [start.ready_s for start in starts]),
            ("first_token", [start.first_token_s for start in starts]),
        ):
            if values:
                keys[f"avg_{phase}_{what}_time"] = sum(values) / len(values)
                keys[f"{phase}_{what}_times"] = values
                keys[f"{phase}_{what}_percentiles"] = {
                    q: percentile(values, int(q) / 100) for q in ("25", "50", "75")
                }
    return keys


def show_certificate(certificate: Certificate, *, as_json: bool) -> None:
    if as_json:
        checks = [asdict(check) | {"passed": check.passed} for check in certificate.checks]
        print_json(asdict(certificate) | {"checks": checks, "passed": certificate.passed})
        return
    _show_settings(certificate.settings)
    print("\nEvery token id and log-probability, bit by bit, against each prompt alone:\n")
    names = ("", "circumstance", "it occurred", "sequences", "tokens", "log-probabilities")
    table = _table(*names, texts=names[:3])
    for check in certificate.checks:
        table.add_row(
            "PASS" if check.passed else "FAIL",
            check.name,
            check.evidence,
            str(check.num_sequences),
            str(check.num_tokens),
            str(check.num_logprobs),
        )
    _print(table)
    for check in certificate.checks:
        if check.failure is not None:
            print(f"{check.name}: {check.failure}")
    for skipped in certificate.skipped:
        print(f"not checked: {skipped}")
    print("PASS" if certificate.passed else "FAIL")


def _show_settings(settings: Mapping[str, str]) -> None:
    width = max(map(len, settings))
    for name, value in settings.items():
        print(f"{name:{width}}  {value}")


def _show_limits(limits: Limits) -> None:
    print(
        f"limits of this machine, {_counted(limits.threads, 'thread')}: reads "
        f"{limits.read_bytes_per_second / _GIGA:.1f} GB/s "
        f"({limits.one_thread_read_bytes_per_second / _GIGA:.1f} with one thread)"
    )
    for isa, floats in limits.float_operations_per_second.items():
        products = limits.int8_operations_per_second[isa]
        print(
            f"  {isa:8}  float32 {floats / _GIGA:6.0f} GFLOP/s  int8 {products / _GIGA:6.0f} GOP/s"
        )


def _warn_of_cached(num_cached_tokens: int) -> None:
    if num_cached_tokens:
        print(f"warning: {num_cached_tokens} prompt tokens came from the prefix cache")


def _table(*names: str, texts: Iterable[str] = ("",)) -> Table:
    """Columns of numbers are right-aligned, those named in `texts` left."""
    table = Table(box=None, pad_edge=False)
    left = set(texts)
    for name in names:
        is_text = name in left
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    return table


def _add_spread(table: Table, name: str, spread: Spread | None, digits: int) -> None:
    if spread is None:
        return
    values = (
        spread.median, spread.mean, spread.lowest, spread.highest, spread.p90, spread.p99,
    )  # fmt: skip
    shown = ("" if value is None else f"{value:.{digits}f}" for value in values)
    table.add_row(name, *shown)


def _per_second(value: float) -> str:
    shown = f"{value / _GIGA:.1f}"
    return "" if shown == "0.0" else shown


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _print(table: Table) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_OF_FILES)
    console.print(table)
