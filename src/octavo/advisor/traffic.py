"""What will be asked of the servers: lengths, load, what prompts share. All forms in which it can
be told become a bench `Workload`, so that plan, simulation and load test ask for the same.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any

from octavo.bench.workloads.arrivals import Arrivals, Gamma
from octavo.bench.workloads.lengths import joint
from octavo.bench.workloads.presets import workload_named
from octavo.bench.workloads.workload import Prefix, RequestClass, Workload
from octavo.core.errors import ConfigError

_SAMPLES = 2000
_SPREAD = 0.5
"""Of lengths of which only the mean is known: they are uniform within ± this share of it."""
_QUANTILE = re.compile(r"(?:p(\d+(?:\.\d+)?)|(min|max))\s*[:=]\s*(\d+(?:\.\d+)?)")
_NORMAL = NormalDist()
# Multiples of these fill a cube evenly without a seed: powers of 1 / x with x^4 = x + 1 (M.
# Roberts, The unreasonable effectiveness of quasirandom sequences, 2018).
_STEPS = (0.8191725133961644, 0.6710436067037892, 0.5497004779019702)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of many requests, in tokens. input: whole prompts; p50: the median; longest: prompt and
    answer together.

    context: that a sequence holds, averaged over the time that sequences live: longer answers live
    longer, so this is above input_mean + output_mean / 2. inverse_output: mean of 1 / (tokens after
    the first), by which the scatter of a request's TPOT falls.
    """

    input_mean: float
    input_p50: float
    input_p99: float
    output_mean: float
    output_p50: float
    longest: int
    context: float
    context_sd: float
    inverse_output: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Exactly one of users and rate is set. users: requests in flight at the peak, each user
    sending the next when the last is answered; rate: requests a second at the
    peak. is_assumed: only mean lengths were told. option: of `octavo bench`, which asks for the
    same lengths; None: a file with the workload is needed. burstiness: as told, None is the
    workload's own.
    """

    workload: Workload
    users: float | None = None
    rate: float | None = None
    is_assumed: bool = False
    option: str | None = None
    burstiness: float | None = None

    @property
    def arrivals(self) -> Arrivals:
        return self.workload.arrivals

    @property
    def burst_cv(self) -> float:
        """Of gaps between arrivals; within a busy period they are a Poisson process."""
        arrivals = self.workload.arrivals
        return 1 / math.sqrt(arrivals.burstiness) if isinstance(arrivals, Gamma) else 1.0

    @property
    def busy_factor(self) -> float:
        """Rate of busy periods, in which most requests come, over the mean rate."""
        arrivals = self.workload.arrivals
        return 1.0 if isinstance(arrivals, Gamma) else arrivals.busy_rate

    @cached_property
    def lengths(self) -> Lengths:
        drawn = list(_sample(self.workload))
        number = len(drawn)
        inputs = sorted(prompt for prompt, _ in drawn)
        outputs = sorted(output for _, output in drawn)
        input_mean, output_mean = self.workload.mean_lengths()
        # A sequence that writes o tokens is seen o times, with o / 2 of them in its context.
        weight = sum(output for _, output in drawn)
        context = sum(o * (i + o / 2) for i, o in drawn) / weight
        square = sum(o * ((i + o / 2) ** 2 + o * o / 12) for i, o in drawn) / weight
        return Lengths(
            input_mean=input_mean,
            input_p50=inputs[number // 2],
            input_p99=inputs[int(0.99 * number)],
            output_mean=output_mean,
            output_p50=outputs[number // 2],
            longest=max(_longest(each) for each in self.workload.classes),
            context=context,
            context_sd=math.sqrt(max(0.0, square - context**2)),
            inverse_output=sum(1 / max(1, output - 1) for _, output in drawn) / number,
        )

    @cached_property
    def hit_rate(self) -> float:
        """Share of prompt tokens that a prefix cache without limit knows."""
        total = known = 0.0
        for each in self.workload.classes:
            own = each.input.mean()
            prefix = each.prefix
            told = 0.0 if prefix is None else prefix.tokens or 0.0
            share = 0.0 if prefix is None else (prefix.share or 0.0) * own
            total += each.weight * (own + told)
            known += each.weight * (told + share)
        return known / total

    @property
    def repetition(self) -> float:
        weights = sum(each.weight for each in self.workload.classes)
        return sum(each.weight * each.repetition for each in self.workload.classes) / weights

    @property
    def load_in_words(self) -> str:
        if self.rate is None:
            return f"{self.users:g} user{'' if self.users == 1 else 's'} at the peak"
        burst = "" if abs(self.burst_cv - 1) < 0.01 else f", gaps with CV {self.burst_cv:.1f}"
        return f"{self.rate:g} requests/s at the peak{burst}"

    def workload_file(self) -> dict[str, Any]:
        """What a workload's YAML file has."""
        values = self.workload.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        for each in values["classes"]:
            for lengths in (each["in"], each["out"]):
                if "quantiles" in lengths:
                    lengths["quantiles"] = dict(lengths["quantiles"])
        return values

    def to_json(self) -> dict[str, Any]:
        lengths = self.lengths
        return {
            "workload": self.workload_file(),
            "users": self.users,
            "rate": self.rate,
            "input_mean": round(lengths.input_mean, 1),
            "input_p99": lengths.input_p99,
            "output_mean": round(lengths.output_mean, 1),
            "longest": lengths.longest,
            "hit_rate": round(self.hit_rate, 4),
            "burst_cv": round(self.burst_cv, 3),
            "lengths_are_assumed": self.is_assumed,
        }


def read_traffic(
    *,
    workload: str | None = None,
    input_len: str | None = None,
    output_len: str | None = None,
    scale: float = 1.0,
    users: float | None = None,
    rate: float | None = None,
    burstiness: float | None = None,
    prefix_share: float = 0.0,
) -> Traffic:
    """As the command line tells it. workload: a preset or a YAML file. input_len, output_len: a
    mean, or quantiles like p50:600,p90:1500,max:4000. Raises ConfigError.
    """
    if users is not None and rate is not None:
        raise ConfigError("give --users (closed loop) or --request-rate (open loop), not both")
    if (input_len is None) != (output_len is None):
        raise ConfigError("give --input-len and --output-len together")
    if workload is not None and input_len is not None:
        raise ConfigError("--workload has its own lengths; leave out --input-len and --output-len")
    is_assumed = False
    option: str | None
    if input_len is not None and output_len is not None:
        means = [_mean(text) for text in (input_len, output_len)]
        is_assumed = None not in means
        if is_assumed:
            load = Workload.of_lengths(round(means[0] or 0), round(means[1] or 0), _SPREAD)
            option = f"--lengths {means[0]:g},{means[1]:g},{_SPREAD:g}"
        else:
            load = _of_quantiles(input_len, output_len)
            option = None
    else:
        name = workload or "chat"
        load, option = workload_named(name), f"--workload {shlex.quote(name)}"
    if scale != 1:
        load = load.scaled(scale)
        option = option and f"{option} --scale {scale:g}"
    if prefix_share:
        load, option = _sharing(load, prefix_share), None
    if burstiness is not None:
        load = load.model_copy(update={"arrivals": Gamma(burstiness=burstiness)})
    if users is None and rate is None:
        users = 1
    return Traffic(
        workload=load,
        users=users,
        rate=rate,
        is_assumed=is_assumed,
        option=option,
        burstiness=burstiness,
    )


def _mean(text: str) -> float | None:
    """None where it is something else than a number."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not 1 <= value < 1e7:
        raise ConfigError(f"a length is from 1 to 10,000,000 tokens, got {text!r}")
    return value


def _of_quantiles(input_len: str, output_len: str) -> Workload:
    only = {
        "name": "requests",
        "in": _lengths("--input-len", input_len),
        "out": _lengths("--output-len", output_len),
    }
    return Workload.model_validate({"name": "told by quantiles", "classes": [only]})


def _lengths(flag: str, text: str) -> Any:
    """A mean, as uniform lengths around it, or a table of quantiles, ends filled in: a lowest of a
    quarter of the first quantile and a highest of twice the last, where they aren't told.
    """
    if (mean := _mean(text)) is not None:
        return {"uniform": [max(1.0, mean * (1 - _SPREAD)), mean * (1 + _SPREAD)]}
    knots: dict[float, float] = {}
    for part in text.split(","):
        match = _QUANTILE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{flag} must be a mean, such as 800, or quantiles, such as "
                f"p50:600,p90:1500,p99:3000,max:8000; {part.strip()!r} is neither"
            )
        percent = {"min": 0.0, "max": 100.0}.get(match[2] or "") if match[2] else float(match[1])
        knots[percent or 0.0] = float(match[3])
    ordered = sorted(knots.items())
    if ordered[-1][0] > 100 or any(a > b for (_, a), (_, b) in pairwise(ordered)):
        raise ConfigError(f"{flag} {text}: quantiles must rise, from 0 to 100 percent")
    knots.setdefault(0.0, max(1.0, ordered[0][1] / 4))
    knots.setdefault(100.0, 2 * ordered[-1][1])
    return {"quantiles": knots}


def _sharing(workload: Workload, share: float) -> Workload:
    if not 0 <= share < 1:
        raise ConfigError(
            f"--prefix-share is a share of the prompt from 0 to below 1, got {share:g}"
        )
    if any(each.prefix is not None for each in workload.classes):
        raise ConfigError(
            f"the workload {workload.name} says itself what prompts share; leave out --prefix-share"
        )
    classes = tuple(
        each.model_copy(update={"prefix": Prefix(share=share)}) for each in workload.classes
    )
    name = f"{workload.name}, {100 * share:g} % shared"
    return workload.model_copy(update={"name": name, "classes": classes})


def _sample(workload: Workload) -> Iterator[tuple[int, int]]:
    """Prompt and answer lengths of requests in the workload's shares, evenly over both."""
    weights = sum(each.weight for each in workload.classes)
    for index in range(_SAMPLES):
        first, second, third = ((0.5 + index * step) % 1 for step in _STEPS)
        place = first * weights
        for each in workload.classes:
            place -= each.weight
            if place < 0:
                break
        z_in, z_own = (_NORMAL.inv_cdf(min(max(u, 1e-9), 1 - 1e-9)) for u in (second, third))
        u_in, u_out = joint(z_in, z_own, each.correlation)
        yield each.input.tokens_at(u_in) + _prefix(each), each.output.tokens_at(u_out)


def _longest(each: RequestClass) -> int:
    most = 1 - 1e-12
    return each.input.tokens_at(most) + _prefix(each) + each.output.tokens_at(most)


def _prefix(each: RequestClass) -> int:
    """Tokens that come on top of the input's."""
    return 0 if each.prefix is None else round(each.prefix.tokens or 0)
