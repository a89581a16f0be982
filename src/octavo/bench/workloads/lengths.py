"""Distributions of lengths in tokens, as a workload file writes them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from octavo.bench.workloads.section import Section, tag

_NORMAL = NormalDist()
_MEAN_STEPS = 10_000
_MOST_TOKENS = 10_000_000

Positive = Annotated[float, Field(gt=0, le=_MOST_TOKENS)]


class Lengths(Section, ABC):
    """A distribution, told by its quantile function."""

    @abstractmethod
    def at(self, u: float) -> float:
        """The length below which a share u of them lies, 0 < u < 1; not yet a whole number."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The same shape, `factor` times as long."""

    def tokens_at(self, u: float) -> int:
        """`at`, as a whole number of tokens, at least one."""
        return max(1, math.floor(self.at(u) + 0.5))

    def mean(self) -> float:
        """Of `tokens_at`, to about a thousandth."""
        total = sum(self.tokens_at((i + 0.5) / _MEAN_STEPS) for i in range(_MEAN_STEPS))
        return total / _MEAN_STEPS


class Fixed(Lengths):
    fixed: Positive

    def at(self, u: float) -> float:
        return self.fixed

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update={"fixed": self.fixed * factor})


class Uniform(Lengths):
    """Every whole number from the first to the second is as likely."""

    uniform: Annotated[tuple[Positive, Positive], Field(strict=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.uniform[0] > self.uniform[1]:
            raise ValueError("the first must not be above the second; swap them")
        return self

    def at(self, u: float) -> float:
        low, high = self.uniform
        return low - 0.5 + u * (high - low + 1)

    def scaled(self, factor: float) -> Self:
        low, high = self.uniform
        return self.model_copy(update={"uniform": (low * factor, high * factor)})


class LogNormalShape(Section):
    median: Positive
    sigma: Annotated[float, Field(gt=0, le=5)]
    low: Positive = 1
    high: Positive = _MOST_TOKENS

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


class LogNormal(Lengths):
    """sigma: standard deviation of the natural logarithm. What lies below low or above high is left
    out and the rest made up to a whole: no heap of requests at the limits.
    """

    lognormal: LogNormalShape

    def at(self, u: float) -> float:
        shape = self.lognormal
        scores = NormalDist(math.log(shape.median), shape.sigma)
        below = scores.cdf(math.log(shape.low))
        above = scores.cdf(math.log(shape.high))
        share = min(max(below + u * (above - below), 1e-12), 1 - 1e-12)
        return min(max(math.exp(scores.inv_cdf(share)), shape.low), shape.high)

    def scaled(self, factor: float) -> Self:
        shape = self.lognormal
        update = {name: factor * getattr(shape, name) for name in ("median", "low", "high")}
        return self.model_copy(update={"lognormal": shape.model_copy(update=update)})


class ExponentialShape(Section):
    mean: Positive
    high: Positive


class Exponential(Lengths):
    """mean: before the limit. What is above high is cut to high, as max_tokens cuts answers."""

    exponential: ExponentialShape

    def at(self, u: float) -> float:
        return min(-self.exponential.mean * math.log1p(-u), self.exponential.high)

    def scaled(self, factor: float) -> Self:
        shape = self.exponential
        update = {"mean": factor * shape.mean, "high": factor * shape.high}
        return self.model_copy(update={"exponential": shape.model_copy(update=update)})


def _as_knots(value: Any) -> Any:
    """A list stands for equal steps from 0 to 100 %."""
    if isinstance(value, list) and len(value) > 1:
        value = {100 * i / (len(value) - 1): length for i, length in enumerate(value)}
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of percent to tokens, or a list in equal steps")
    knots = []
    for percent, tokens in value.items():
        numbers = (percent, tokens)
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise ValueError(f"{percent!r}: {tokens!r} must be two numbers, percent: tokens")
        knots.append((float(percent), float(tokens)))
    knots.sort()
    if len(knots) < 2 or knots[0][0] != 0 or knots[-1][0] != 100:
        raise ValueError("must begin at 0 percent and end at 100 percent")
    if not 0 < knots[0][1] <= knots[-1][1] <= _MOST_TOKENS:
        raise ValueError(f"must lie above 0 and be at most {_MOST_TOKENS} tokens")
    for (_, low), (percent, high) in pairwise(knots):
        if low > high:
            raise ValueError(f"{high:g} tokens at {percent:g} percent is less than before it")
    return tuple(knots)


class Quantiles(Lengths):
    """A table of percent and tokens, straight between its entries."""

    quantiles: Annotated[tuple[tuple[float, float], ...], BeforeValidator(_as_knots)]

    def at(self, u: float) -> float:
        percent = 100 * u
        knots = self.quantiles
        right = min(bisect_right(knots, percent, key=lambda knot: knot[0]), len(knots) - 1)
        (p0, low), (p1, high) = knots[right - 1], knots[right]
        return low + (high - low) * (percent - p0) / (p1 - p0)

    def scaled(self, factor: float) -> Self:
        knots = tuple((percent, factor * tokens) for percent, tokens in self.quantiles)
        return self.model_copy(update={"quantiles": knots})


def _in_words(value: Any) -> Any:
    """A number alone is a fixed length."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"fixed": value} if is_number else value


def _kind(value: Any) -> str | None:
    if isinstance(value, dict) and len(value) == 1:
        return tag(str(next(iter(value))))
    return tag(type(value).__name__.lower()) if isinstance(value, Lengths) else None


AnyLengths = Annotated[
    Annotated[Fixed, Tag(tag("fixed"))]
    | Annotated[Uniform, Tag(tag("uniform"))]
    | Annotated[LogNormal, Tag(tag("lognormal"))]
    | Annotated[Exponential, Tag(tag("exponential"))]
    | Annotated[Quantiles, Tag(tag("quantiles"))],
    Discriminator(
        _kind,
        custom_error_type="lengths",
        custom_error_message="must be a number of tokens, or a mapping with one of fixed, uniform, "
        "lognormal, exponential, quantiles",
    ),
    BeforeValidator(_in_words),
]


def joint(z_in: float, z_own: float, correlation: float) -> tuple[float, float]:
    """Two shares in (0, 1) for `at`, from two independent standard normal numbers: a Gaussian
    copula, in which the correlation is that of the normal scores.
    """
    z_out = correlation * z_in + math.sqrt(1 - correlation**2) * z_own
    return _share(z_in), _share(z_out)


def _share(z: float) -> float:
    return min(max(_NORMAL.cdf(z), 1e-12), 1 - 1e-12)
