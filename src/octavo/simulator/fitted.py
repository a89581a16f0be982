"""What steps cost by those that were recorded: see fitting.py for how it is learned."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any, Self

from octavo.core.errors import ConfigError
from octavo.simulator.cost_model import Provenance
from octavo.simulator.work import StepWork

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What a step's seconds are a sum of, each times a factor of its own that isn't negative.

    knots: numbers of rows at which their cost may change, from 0 on: products with weights have a
    row's cost that depends on how many there are. shares: of each window, what part of a token's
    cache its layers have.
    """

    knots: tuple[int, ...]
    shares: tuple[float, ...]

    def of(self, work: StepWork) -> list[float]:
        values = [1.0]
        rows, knots = work.num_tokens, self.knots
        last = len(knots) - 1
        for index, knot in enumerate(knots):
            beyond = rows - knot
            if beyond <= 0:
                values.append(0.0)
            elif index == last:
                values.append(float(beyond))
            else:
                values.append(float(min(beyond, knots[index + 1] - knot)))
        decoding = context = pairs = 0.0
        for share, one in zip(self.shares, work.attention, strict=True):
            decoding += share * one.decoding_context
            context += share * one.chunk_context
            pairs += share * one.chunk_pairs
        values += (work.num_logit_rows, work.num_sequences, work.num_new, decoding, context, pairs)
        return values


def draft_terms(work: StepWork) -> list[float]:
    return [float(work.num_drafting), float(work.longest_draft), float(work.num_draft_tokens)]


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """A `CostModel` by regression.

    factors: of the terms. alternatives: factors that other steps of the same kind would have given.
    drift: by how much, as the standard deviation of a logarithm, all steps of a run are slower or
    faster than those of another. ratios: quantiles, evenly spaced, of what a step took over what
    was expected; their mean is 1. draft_factors: of `draft_terms`. num_steps: learned from.
    mean_error: of steps that weren't learned from, as a share.
    """

    windows: tuple[int | None, ...]
    terms: StepTerms
    factors: tuple[float, ...]
    alternatives: tuple[tuple[float, ...], ...]
    drift: float
    ratios: tuple[float, ...]
    draft_factors: tuple[float, ...]
    num_steps: int
    mean_error: float
    num_stages: int = 1
    provenance: Provenance = "fitted"

    def seconds(self, work: StepWork) -> float:
        return _product(self.factors, self.terms.of(work))

    def draft_seconds(self, work: StepWork) -> float:
        if not work.num_drafting:
            return 0.0
        return _product(self.draft_factors, draft_terms(work))

    def draw(self, rng: random.Random) -> ScatteredCost:
        speed = math.exp(rng.gauss(0.0, self.drift))
        factors = rng.choice(self.alternatives) if self.alternatives else self.factors
        drawn = replace(
            self,
            factors=tuple([speed * factor for factor in factors]),
            draft_factors=tuple([speed * factor for factor in self.draft_factors]),
        )
        return ScatteredCost(drawn, rng)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": _FORMAT, **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError for a file that `save` didn't write."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != _FORMAT:
                raise ValueError("another version")
            return cls(**_from_json(values))
        except OSError as error:
            raise ConfigError(f"the fitted costs {path} can't be read: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} has no fitted costs of this version ({error}); fit them again"
            ) from None


@dataclass(frozen=True, slots=True)
class ScatteredCost:
    """A fitted one whose steps differ as recorded ones did."""

    mean: FittedCost
    rng: random.Random

    @property
    def provenance(self) -> Provenance:
        return self.mean.provenance

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.mean.windows

    @property
    def num_stages(self) -> int:
        return self.mean.num_stages

    def seconds(self, work: StepWork) -> float:
        return self.mean.seconds(work) * self.rng.choice(self.mean.ratios)

    def draft_seconds(self, work: StepWork) -> float:
        return self.mean.draft_seconds(work)

    def draw(self, rng: random.Random) -> ScatteredCost:
        return self.mean.draw(rng)


def _product(factors: Sequence[float], values: Sequence[float]) -> float:
    total: float = sum(map(mul, factors, values))
    return total


def _from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    terms = values["terms"]
    return {
        **values,
        "windows": tuple(values["windows"]),
        "terms": StepTerms(tuple(terms["knots"]), tuple(terms["shares"])),
        "factors": _floats(values["factors"]),
        "alternatives": tuple(map(_floats, values["alternatives"])),
        "ratios": _floats(values["ratios"]),
        "draft_factors": _floats(values["draft_factors"]),
    }


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))
