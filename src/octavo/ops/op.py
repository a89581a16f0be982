"""What an op is, who implements it, and which implementation runs.

An op is declared once, by a function without a body whose docstring is its formula. Implementations
register for it under a backend and an array type. At start-up one of them is chosen for the target
(device and dtype), and a call goes to the choice for the type of its first argument. So a model is
a plain function of ops, whatever array type flows through it.

Choices are the process's: models with different targets live side by side, but for one target a
choice stays as it was first made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from octavo.core.errors import ConfigError, InvariantError

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_NO_DIFFERENCE = 4 / 3
"""Times whose ratio is less may differ by chance (the same code took up to 1.3 times as long on a
busy machine); then ranks decide, so that starts choose alike.
"""

OPS: dict[str, Op[..., Any]] = {}
"""All declared ops by name."""


class Target(NamedTuple):
    """What an implementation has to run on.

    device: "cpu" or "cuda". dtype: of the activations, "float32", "bfloat16" or "float16".
    """

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    backend: "torch" or "native". name: unique within op, backend and array type, e.g. "reference".
    array_type: the class of the op's first argument. unsupported: asked at start-up; None if it
    runs on this machine for the target, else the reason why not.
    rank: of those that run, the highest is the automatic choice, unless times are measured.
    """

    op: str
    backend: str
    name: str
    array_type: type
    function: Callable[..., Any]
    unsupported: Callable[[Target], str | None]
    rank: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome for one op, array type and target: what runs, and why; `rejected` says of each
    other one why not.
    """

    op: str
    implementation: Implementation
    reason: str
    rejected: tuple[tuple[str, str], ...]


class Op(Generic[P, R]):
    """A declared op. Calling it, with the first argument by position, runs what was chosen."""

    def __init__(self, declaration: Callable[P, R]) -> None:
        self.name = declaration.__name__
        self.__doc__ = declaration.__doc__
        self.signature = inspect.signature(declaration)
        self.implementations: list[Implementation] = []
        self._by_target: dict[type, dict[Target, Implementation]] = {}
        self._chosen: dict[type, Callable[..., R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            function = self._chosen[type(args[0])]
        except (IndexError, KeyError):
            raise InvariantError(self._why_not(args)) from None
        return function(*args, **kwargs)

    def _why_not(self, args: tuple[object, ...]) -> str:
        if not args:
            return f"op {self.name}: the first argument must be given by position"
        return f"op {self.name}: nothing chosen for arrays of type {type(args[0]).__name__}"

    def choices(
        self,
        backend: str,
        target: Target,
        name: str | None = None,
        seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Choice]:
        """What would run, for each array type of `backend`: the one called `name` (an error if it
        can't), else the fastest that can. seconds: that implementations were measured to take.
        """
        candidates = [i for i in self.implementations if i.backend == backend]
        if name is not None and name not in (known := [i.name for i in candidates]):
            raise ConfigError(
                f"op {self.name} has no {backend} implementation {name!r}; there are: "
                f"{', '.join(dict.fromkeys(known))}"
            )
        by_type: dict[type, list[Implementation]] = {}
        for candidate in candidates:
            by_type.setdefault(candidate.array_type, []).append(candidate)
        return [self._best(group, target, name, seconds) for group in by_type.values()]

    def _best(
        self,
        group: list[Implementation],
        target: Target,
        name: str | None,
        seconds: Mapping[str, float],
    ) -> Choice:
        reasons = {i.name: i.unsupported(target) for i in group}
        asked = name if name in reasons else None  # of the backend's other array type
        if asked is not None and reasons[asked] is not None:
            raise ConfigError(
                f"op {self.name}: {asked!r} can't run {target}: {reasons[asked]}; leave it out of "
                "--kernels, or choose another"
            )
        able = [i for i in group if reasons[i.name] is None and asked in (None, i.name)]
        if not able:
            raise InvariantError(f"op {self.name} has no implementation that runs {target}")
        least = min((seconds.get(i.name, math.inf) for i in able), default=math.inf)
        fast = [i for i in able if seconds.get(i.name, math.inf) <= _NO_DIFFERENCE * least]
        best = max(fast, key=lambda i: i.rank)

        def why_not(other: Implementation) -> str:
            if (problem := reasons[other.name]) is not None:
                return problem
            if asked is not None:
                return "not asked for"
            if other.name not in seconds:
                return f"slower than {best.name}"
            told = f"takes {1e6 * seconds[other.name]:.1f} µs"
            return f"{told}, which is no difference" if other in fast else told

        if asked is not None:
            reason = "asked for"
        elif len(group) == 1:
            reason = "the only one"
        elif best.name in seconds:
            what = "the fastest" if seconds[best.name] == least else "as fast as any"
            reason = f"{what} measured here, takes {1e6 * seconds[best.name]:.1f} µs"
        else:
            reason = "the fastest that runs here"
        rejected = tuple((i.name, why_not(i)) for i in group if i is not best)
        return Choice(self.name, best, reason, rejected)

    def check_free(self, choice: Choice, target: Target) -> None:
        """Raises ConfigError if the process has chosen otherwise."""
        taken = self._by_target.get(choice.implementation.array_type, {}).get(target)
        if taken is not None and taken is not choice.implementation:
            raise ConfigError(
                f"op {self.name} already runs {taken.name!r} {target} in this process, for another "
                f"model; {choice.implementation.name!r} needs a process of its own, or the same "
                "kernels for both"
            )

    def install(self, choice: Choice, target: Target, target_of: Callable[[Any], Target]) -> None:
        """Let calls with such arrays go to the choice. target_of: tells an array's target; asked
        only once targets with different choices live in the process.
        """
        array_type = choice.implementation.array_type
        by_target = self._by_target.setdefault(array_type, {})
        by_target[target] = choice.implementation
        if len({id(i) for i in by_target.values()}) == 1:
            self._chosen[array_type] = choice.implementation.function
            return

        def by_array(*args: Any, **kwargs: Any) -> R:
            actual = target_of(args[0])
            if actual not in by_target:
                raise InvariantError(f"op {self.name}: nothing chosen for {actual}")
            result: R = by_target[actual].function(*args, **kwargs)
            return result

        self._chosen[array_type] = by_array


def op(declaration: Callable[P, R]) -> Op[P, R]:
    """Declare an op. The docstring gives formula, shapes and source; the body is never run."""
    declared = Op(declaration)
    if declared.name in OPS:
        raise InvariantError(f"op {declared.name} is declared twice")
    OPS[declared.name] = declared
    return declared


def implements(
    target: Op[..., Any],
    *,
    backend: str,
    array_type: type,
    name: str = "reference",
    unsupported: Callable[[Target], str | None] = lambda _: None,
    rank: int = 0,
) -> Callable[[F], F]:
    """Register the decorated function as an implementation of `target`. Its parameters must be the
    op's; arrays are of `array_type`.
    """

    def register(function: F) -> F:
        names = list(inspect.signature(function).parameters)
        if names != list(target.signature.parameters):
            wanted = list(target.signature.parameters)
            raise InvariantError(
                f"{backend} {name} of op {target.name} takes {names}, not {wanted}"
            )
        target.implementations.append(
            Implementation(target.name, backend, name, array_type, function, unsupported, rank)
        )
        return function

    return register


def choose_all(
    backend: str,
    target: Target,
    asked: Mapping[str, str],
    target_of: Callable[[Any], Target],
    seconds: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> tuple[Choice, ...]:
    """Decide for every op that `backend` implements, and let calls go there; nothing is changed if
    one can't be. asked: op name to implementation name. seconds: that implementations were measured
    to take, by op name and implementation name.
    """
    if unknown := asked.keys() - OPS.keys():
        raise ConfigError(f"unknown op {sorted(unknown)[0]!r}; ops: {', '.join(sorted(OPS))}")
    choices = tuple(
        choice
        for declared in OPS.values()
        for choice in declared.choices(
            backend, target, asked.get(declared.name), seconds.get(declared.name, {})
        )
    )
    for choice in choices:
        OPS[choice.op].check_free(choice, target)
    for choice in choices:
        OPS[choice.op].install(choice, target, target_of)
    return choices
