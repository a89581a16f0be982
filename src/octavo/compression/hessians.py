"""How inputs of matrices go together over a text: the mean of x x^T, by which GPTQ rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from octavo.layers.mlp import GatedMLP
from octavo.models.loader import load_layer
from octavo.models.stored_piece import Checkpoint
from octavo.ops import Array
from octavo.ops.backend import Backend

_FEWEST_ROWS = 512
"""An expert that fewer tokens of the text go to is given others, too: a few tokens say nothing of
the directions that they don't have, and errors would be pushed there.
"""
_PASS_ROWS = 1024


class Hessians(Mapping[str, np.ndarray]):
    """By name of a matrix: the mean of x x^T over its inputs x, (I, I) float64.

    Those of experts are made when they are asked for: all together can be larger than the model.
    """

    def __init__(
        self, ready: Mapping[str, np.ndarray], experts: Sequence[ExpertInputs] = ()
    ) -> None:
        self._ready = ready
        self._made = {name: make for one in experts for name, make in one.hessians()}
        self._last: tuple[Callable[[], np.ndarray], np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._ready:
            return self._ready[name]
        make = self._made[name]
        if self._last is None or self._last[0] is not make:
            self._last = make, make()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        yield from self._ready
        yield from self._made

    def __len__(self) -> int:
        return len(self._ready) + len(self._made)


class ExpertInputs:
    """Of one layer. experts: a `GatedMLP` each, without weights. x (N, D): all tokens. routing (N,
    2K): as of `ops.route`.
    """

    def __init__(
        self,
        experts: list[GatedMLP],
        x: np.ndarray,
        routing: np.ndarray,
        checkpoint: Checkpoint,
        backend: Backend,
    ) -> None:
        self._experts = experts
        self._x = x
        self._chosen = routing[:, routing.shape[1] // 2 :]
        self._checkpoint = checkpoint
        self._backend = backend

    def hessians(self) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Names of all matrices with what makes their Hessian, the same for the same inputs."""
        for number, expert in enumerate(self._experts):
            of_inputs, of_inner = partial(self._of_inputs, number), partial(self._of_inner, number)
            yield from ((name, of_inputs) for name in expert.gate_up.weight.names)
            yield from ((name, of_inner) for name in expert.down.weight.names)

    def _of_inputs(self, number: int) -> np.ndarray:
        return mean_products([self._rows(number)])

    def _of_inner(self, number: int) -> np.ndarray:
        expert, backend, rows = self._experts[number], self._backend, self._rows(number)
        load_layer(expert.gate_up, self._checkpoint, backend, "float32")

        def function(x: Array) -> Array:
            return expert.gate(expert.gate_up(x))

        inner = backend.compile(function)
        seen = [
            backend.to_host(inner(backend.from_host(rows[begin : begin + _PASS_ROWS])))
            for begin in range(0, len(rows), _PASS_ROWS)
        ]
        expert.gate_up.weight.release()
        return mean_products(seen)

    def _rows(self, number: int) -> np.ndarray:
        is_given = (self._chosen == number).any(axis=1)
        others = np.flatnonzero(~is_given)
        missing = min(_FEWEST_ROWS - int(is_given.sum()), len(others))
        if missing > 0:  # from all over the text
            is_given[others[np.arange(missing) * len(others) // missing]] = True
        rows: np.ndarray = self._x[is_given]
        return rows


def mean_products(parts: list[np.ndarray]) -> np.ndarray:
    """The mean of x x^T over the rows x of all parts (n, I): (I, I) float64."""
    total = np.zeros((parts[0].shape[1],) * 2)
    for rows in parts:
        total += rows.T @ rows
    total /= sum(map(len, parts))
    return total
