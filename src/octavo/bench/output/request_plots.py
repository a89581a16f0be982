"""Pictures of single requests: distributions, and one load point over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from octavo.bench.output import style
from octavo.bench.output.text import number
from octavo.bench.records import RequestRecord
from octavo.bench.window import end_ns

_METRICS = (
    ("ttft", "Time to first token (ms)"),
    ("tpot", "Time per output token (ms)"),
    ("itl", "Inter-token latency (ms)"),
    ("e2e", "End to end (ms)"),
)
_MOST_STEPS = 500  # of a drawn distribution


@dataclass(frozen=True)
class Samples:
    """Of one load point: each metric's values. name: what the curve is called."""

    name: str
    values: Mapping[str, Sequence[float]]


def distributions(samples: Sequence[Samples], *, load: str, subtitle: str) -> Figure:
    """For each metric, the share of values that are at most so large; a curve for each load, from
    light to dark.
    """
    figure = style.new_figure("Distributions", subtitle, width=9.6, height=6.4)
    colors = _shades(len(samples))
    for axes, (metric, title) in zip(figure.subplots(2, 2).flat, _METRICS, strict=True):
        axes.set_title(title)
        axes.set_ylim(0, 103)
        axes.set_ylabel("% at most")
        drawn = [
            (one.values.get(metric) or (), color)
            for one, color in zip(samples, colors, strict=True)
        ]
        everything = [value for values, _ in drawn for value in _inner(values)]
        if not everything:
            axes.text(0.5, 0.5, "n/a", transform=axes.transAxes, ha="center", color=style.MUTED)
            continue
        style.scale_for(axes, "x", everything)
        for values, color in drawn:
            if values:
                axes.step(*_cumulative(values), where="post", color=color, lw=1.6)
    _shade_key(figure, [one.name for one in samples], colors, load)
    return figure


def timeline(
    records: Sequence[RequestRecord],
    ttft_ms: Sequence[float | None],
    *,
    subtitle: str,
    steady_ns: tuple[int, int] | None = None,
) -> Figure:
    """Requests in the server, output tokens/s and each request's TTFT, over the seconds since the
    first was due. ttft_ms: of each record. steady_ns: from when to when rates count.
    """
    start = min(record.scheduled_ns for record in records)
    seconds = max((max(map(end_ns, records)) - start) / 1e9, 1e-3)
    figure = style.new_figure("Over time", subtitle, width=9.6, height=5.6)
    running, speed, first = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.3))

    running.set_title("Requests in flight")
    _filled_steps(running, *_in_flight(records, start), style.BLUE)

    width = _bin_seconds(seconds)
    speed.set_title(f"Output tokens/s, means of {number(width)} s")
    edges = [width * i for i in range(int(seconds / width) + 2)]
    tokens = _tokens_in_bins(records, start, width, len(edges))
    _filled_steps(speed, edges, [count / width for count in tokens], style.GREEN)

    first.set_title("Time to first token of a request that was due then (ms)")
    _first_tokens(first, records, ttft_ms, start)
    first.set_xlabel("seconds")
    first.set_xlim(0, 1.01 * seconds)
    if steady_ns is not None:
        begin_s, end_s = ((ns - start) / 1e9 for ns in steady_ns)
        for axes in (running, speed, first):
            axes.axvspan(0, begin_s, color=style.MUTED, alpha=0.12, lw=0)
            axes.axvspan(end_s, 1.01 * seconds, color=style.MUTED, alpha=0.12, lw=0)
        _remark(running, "figures are of the white part")
    return figure


def _filled_steps(axes: Axes, xs: Sequence[float], ys: Sequence[float], color: str) -> None:
    axes.fill_between(xs, ys, step="post", color=color, alpha=0.2, lw=0)
    axes.step(xs, ys, where="post", color=color, lw=1.2)
    axes.set_ylim(0, None)


def _first_tokens(
    axes: Axes, records: Sequence[RequestRecord], ttft_ms: Sequence[float | None], start: int
) -> None:
    due = [(record.scheduled_ns - start) / 1e9 for record in records]
    known = [
        (at, value)
        for at, value, record in zip(due, ttft_ms, records, strict=True)
        if value is not None and record.is_ok
    ]
    if known:
        style.scale_for(axes, "y", [value for _, value in known])
        axes.plot(*zip(*known, strict=True), "o", ms=3.2, color=style.ORANGE, alpha=0.6, mew=0)
    failed = [at for at, record in zip(due, records, strict=True) if not record.is_ok]
    if failed:
        top = [0.97] * len(failed)
        axes.plot(failed, top, "x", transform=style.at_x(axes), color=style.INK, ms=5, mew=1.2)
        _remark(axes, f"× {len(failed)} failed or cancelled")


def _remark(axes: Axes, text: str) -> None:
    """In the line of the title, on the right."""
    axes.annotate(
        text,
        (1, 1),
        xycoords="axes fraction",
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=style.MUTED,
    )


def _shades(count: int) -> list[str]:
    """From light to dark; monotone in lightness, so that order shows without colour, too."""
    ramp = colormaps["viridis_r"]
    return [to_hex(ramp(0.15 + 0.8 * i / max(1, count - 1))) for i in range(count)]


def _shade_key(figure: Figure, names: Sequence[str], colors: Sequence[str], load: str) -> None:
    if len(names) < 2:
        return
    handles = [figure.axes[0].plot([], [], color=color, lw=3)[0] for color in colors]
    figure.legend(
        handles,
        names,
        title=load,
        loc="outside right upper",
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        handlelength=1.2,
        labelcolor=style.INK,
    )


def _cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps up to 100 %; of long samples only as many as a picture can show."""
    ordered = sorted(values)
    count = len(ordered)
    steps = min(count, _MOST_STEPS)
    ranks = [round(i * (count - 1) / max(1, steps - 1)) for i in range(steps)]
    return [ordered[rank] for rank in ranks], [100 * (rank + 1) / count for rank in ranks]


def _inner(values: Sequence[float]) -> list[float]:
    """The values' range without the outermost thousandth on each side, for the axis."""
    if len(values) < 2:
        return list(values)
    cuts = quantiles(values, n=1000, method="inclusive")
    return [cuts[0], cuts[-1]]


def _in_flight(records: Sequence[RequestRecord], start: int) -> tuple[list[float], list[int]]:
    changes = sorted(
        change
        for record in records
        if record.sent_ns is not None
        for change in ((record.sent_ns, 1), (end_ns(record), -1))
    )
    times, counts, now = [0.0], [0], 0
    for at, step in changes:
        now += step
        times.append((at - start) / 1e9)
        counts.append(now)
    return times, counts


def _tokens_in_bins(
    records: Sequence[RequestRecord], start: int, width: float, count: int
) -> list[float]:
    """A request's tokens are shared evenly by its chunks: often the server doesn't tell more."""
    bins = [0.0] * count
    for record in records:
        for ns in record.chunk_ns:
            bins[int((ns - start) / 1e9 / width)] += record.num_output_tokens / len(record.chunk_ns)
    return bins


def _bin_seconds(seconds: float) -> float:
    """Of about eighty bins, the next longer one that is 1, 2 or 5 times a power of ten."""
    steps = [step * 10.0**decade for decade in range(-3, 4) for step in (1, 2, 5)]
    return steps[min(bisect_right(steps, seconds / 80), len(steps) - 1)]
