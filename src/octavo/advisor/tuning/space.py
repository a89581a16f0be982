"""The settings that may be tried: knobs, their values, and which settings are near each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from octavo.core.errors import ConfigError, InvariantError

Setting = tuple[Any, ...]
"""One value for each dimension of a space, in their order."""

DEFAULT = None
"""As a value: the knob is not given, and the engine decides."""

_MOST_DRAWS = 20
"""After which a space is sampled no further: it allows too little."""


@dataclass(frozen=True)
class Dimension:
    """One knob. values: at least one, all different, `default` among them; in rising order if
    is_ordered, where DEFAULT stands outside of the order, at the beginning.
    """

    name: str
    values: tuple[Any, ...]
    default: Any = DEFAULT
    is_ordered: bool = False

    def __post_init__(self) -> None:
        if self.default not in self.values or len(set(self.values)) < len(self.values):
            raise InvariantError(f"{self.name}: {self.values} must differ and have {self.default}")

    def neighbours(self, value: Any) -> tuple[Any, ...]:
        """Of an ordered knob, the next ones up and down, and the default; of others, all others."""
        others = tuple(other for other in self.values if other != value)
        if not self.is_ordered or value is DEFAULT:
            return others
        place = self.values.index(value)
        near = {*self.values[max(0, place - 1) : place + 2], self.default}
        return tuple(other for other in others if other in near)


@dataclass(frozen=True)
class Space:
    """The combinations of the dimensions' values that are allowed; the default always is."""

    dimensions: tuple[Dimension, ...]
    allows: Callable[[Setting], bool] = lambda setting: True

    @property
    def default(self) -> Setting:
        return tuple(each.default for each in self.dimensions)

    @property
    def size(self) -> int:
        """Of all combinations."""
        return prod(len(each.values) for each in self.dimensions)

    def named(self, setting: Setting) -> dict[str, Any]:
        """Value by knob."""
        return {d.name: value for d, value in zip(self.dimensions, setting, strict=True)}

    def changes(self, setting: Setting) -> dict[str, Any]:
        """Value by knob, of those that are not at their default."""
        return {
            d.name: value
            for d, value in zip(self.dimensions, setting, strict=True)
            if value != d.default
        }

    def setting(self, changes: Mapping[str, Any]) -> Setting:
        """The default but for these knobs."""
        return tuple(changes.get(d.name, d.default) for d in self.dimensions)

    def neighbours(self, setting: Setting) -> Iterator[Setting]:
        """Those that differ in one knob, by a small step where the knob has an order."""
        for place, dimension in enumerate(self.dimensions):
            yield from self._with_values(setting, place, dimension.neighbours(setting[place]))

    def one_knob_away(self, setting: Setting) -> Iterator[Setting]:
        """All that differ in one knob."""
        for place, dimension in enumerate(self.dimensions):
            yield from self._with_values(setting, place, dimension.values)

    def taken_back(self, setting: Setting) -> list[Setting]:
        """With each of its changes at the default again, one at a time."""
        changes = self.changes(setting)
        simpler = [self.setting({n: v for n, v in changes.items() if n != own}) for own in changes]
        return [one for one in simpler if self.allows(one)]

    def sample(self, count: int, rng: random.Random) -> list[Setting]:
        """Different settings, all of them if there are no more. Each value of a knob comes about
        equally often (a Latin hypercube), but for what is drawn again or is not allowed.
        """
        if count >= self.size:
            return list(filter(self.allows, product(*(d.values for d in self.dimensions))))
        found: dict[Setting, None] = {}
        for _ in range(_MOST_DRAWS):
            columns = [_shuffled_values(d.values, count, rng) for d in self.dimensions]
            for setting in filter(self.allows, zip(*columns, strict=True)):
                found.setdefault(setting)
            if len(found) >= count:
                break
        return list(found)[:count]

    def only(self, name: str, values: Sequence[Any]) -> Space:
        """The same with fewer values for one knob; its default stays."""
        dimensions = (
            replace(d, values=tuple(v for v in d.values if v in values or v == d.default))
            if d.name == name
            else d
            for d in self.dimensions
        )
        return replace(self, dimensions=tuple(dimensions))

    def _with_values(
        self, setting: Setting, place: int, values: Sequence[Any]
    ) -> Iterator[Setting]:
        for value in values:
            if value != setting[place]:
                other = (*setting[:place], value, *setting[place + 1 :])
                if self.allows(other):
                    yield other


def distance(one: Setting, other: Setting) -> int:
    """Knobs in which they differ."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def as_text(changes: Mapping[str, Any]) -> str:
    """For people: `max_num_seqs=16 block_size=32`, or `default`."""
    return " ".join(f"{name}={value_text(value)}" for name, value in changes.items()) or "default"


def value_text(value: Any) -> str:
    if value is DEFAULT:
        return "default"
    return str(value).lower() if isinstance(value, bool) else str(value)


def require_choice(space: Space) -> None:
    """Raises ConfigError for a space of the default alone."""
    if space.size < 2:
        raise ConfigError(
            "no knob is left to tune: every one has but its default that can matter here; name "
            "others, or other values, with --knob NAME=VALUE,VALUE"
        )


def _shuffled_values(values: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    column = [values[i % len(values)] for i in range(count)]
    rng.shuffle(column)
    return column
