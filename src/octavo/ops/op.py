"""What an op is, who implements it, and which implementation runs.

An op is declared once, by a function without a body whose docstring is its formula. Implementations
register for it under a backend; one per op and backend is chosen at start-up (`choose`), and a call
goes to the one of the backend that owns the first argument. So a model is a plain function of ops,
whatever array type flows through it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from octavo.core.errors import ConfigError, InvariantError

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

OPS: dict[str, Op[..., Any]] = {}
"""All declared ops by name."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    backend: "torch" or "native". name: unique within op and backend, e.g. "reference". array_type:
    the class of the op's first argument. unsupported: asked at start-up; None if it runs on this
    machine, else the reason why not.
    rank: of those that run, the highest is the automatic choice.
    """

    op: str
    backend: str
    name: str
    array_type: type
    function: Callable[..., Any]
    unsupported: Callable[[], str | None]
    rank: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome for one op: what runs, and why; `rejected` says of each other one why not."""

    op: str
    implementation: Implementation
    reason: str
    rejected: tuple[tuple[str, str], ...]


class Op(Generic[P, R]):
    """A declared op; calling it runs the chosen implementation of the backend that owns its first
    argument.
    """

    def __init__(self, declaration: Callable[P, R]) -> None:
        self.name = declaration.__name__
        self.__doc__ = declaration.__doc__
        self.signature = inspect.signature(declaration)
        self.implementations: list[Implementation] = []
        self._chosen: dict[type, Callable[..., R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            function = self._chosen[type(args[0])]
        except KeyError:
            raise InvariantError(
                f"op {self.name}: nothing chosen for arrays of type {type(args[0]).__name__}"
            ) from None
        return function(*args, **kwargs)

    def choose(self, backend: str, name: str | None = None) -> Choice:
        """Decide what runs for `backend`: the one called `name` (an error if it can't), else the
        best that can.
        """
        candidates = [i for i in self.implementations if i.backend == backend]
        reasons = {i.name: i.unsupported() for i in candidates}
        if name is not None:
            if name not in reasons:
                known = ", ".join(reasons)
                raise ConfigError(
                    f"op {self.name} has no {backend} implementation {name!r}; there are: {known}"
                )
            if reasons[name] is not None:
                raise ConfigError(
                    f"op {self.name}: {backend} {name!r} can't run here: {reasons[name]}"
                )
        able = [i for i in candidates if reasons[i.name] is None and name in (None, i.name)]
        if not able:
            raise InvariantError(f"op {self.name} has no {backend} implementation that runs here")
        best = max(able, key=lambda i: i.rank)
        self._chosen[best.array_type] = best.function
        rejected = tuple(
            (i.name, reasons[i.name] or ("not asked for" if name else f"slower than {best.name}"))
            for i in candidates
            if i is not best
        )
        if name is not None:
            reason = "asked for"
        else:
            reason = "the only one" if len(candidates) == 1 else "the fastest that runs here"
        return Choice(self.name, best, reason, rejected)


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
    unsupported: Callable[[], str | None] = lambda: None,
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


def choose_all(backend: str, asked: dict[str, str] | None = None) -> Iterator[Choice]:
    """Decide for every op that `backend` implements. asked: op name to implementation name."""
    asked = asked or {}
    if unknown := asked.keys() - OPS.keys():
        raise ConfigError(f"unknown op {sorted(unknown)[0]!r}; ops: {', '.join(sorted(OPS))}")
    for declared in OPS.values():
        yield declared.choose(backend, asked.get(declared.name))
