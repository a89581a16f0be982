"""Functions of ops, recorded once and replayed with other numbers of rows.

A function's arrays become places on a tape and its batch context a context of such arrays; all
other arguments are constants of the recording. So a function may be recorded whose control flow
depends on constants and on shapes behind the first axis, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from octavo.core.errors import InvariantError
from octavo.ops.batch import BatchContext, HostBatch
from octavo.ops.native import _native
from octavo.ops.native.array import UNKNOWN, NativeArray, Place
from octavo.ops.native.runtime import Runtime

TOKENS, ROWS = 0, 1
"""Symbols of csrc/tape.h: rows of floats and of the batch, and rows picked by an index array."""


class RegionTime(NamedTuple):
    """What one region of a timed replay did. bytes: weights and cache that it read. operations:
    multiplications and additions of products and attention.
    """

    name: str
    nanoseconds: float
    bytes: float
    operations: float


class Recorder:
    """A tape while it is recorded."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tape = _native.Tape(runtime.pool, runtime.kernels)
        self.kept: list[object] = []

    def placeholder(self, array: NativeArray) -> NativeArray:
        """What stands for an array of replays. Integers index; floats are activations."""
        if array.values.dtype == np.int64:
            symbol = TOKENS if array.shape[1:] else ROWS
            return self.at(self.tape.int_input(symbol), ())
        return self.at(self.tape.input(TOKENS, array.columns), array.shape[1:])

    def batch_placeholder(self, ctx: BatchContext) -> BatchContext:
        return replace(
            ctx,
            token_ids=self.at(self.tape.int_input(TOKENS), ()),
            positions=self.at(self.tape.int_input(TOKENS), ()),
        )

    def at(self, ref: tuple[int, int], row_shape: tuple[int, ...]) -> NativeArray:
        """The array at a place of the tape."""
        return NativeArray(self.runtime, (UNKNOWN, *row_shape), place=Place(self, *ref))

    def keep(self, value: np.ndarray) -> np.ndarray:
        """Constants live as long as the tape, which knows only where they are."""
        self.kept.append(value)
        return value


class Recording:
    """A finished tape, and how the arguments of a call become its inputs."""

    def __init__(
        self, runtime: Runtime, function: Callable[..., Any], args: Sequence[Any], **kwargs: Any
    ) -> None:
        recorder = Recorder(runtime)
        result = function(*(_symbolic(recorder, arg) for arg in args), **kwargs)
        self._runtime = runtime
        self._tape = recorder.tape
        self._kept = recorder.kept + [arg for arg in args if not _flows(arg)]
        self._is_tuple = isinstance(result, tuple)
        results = result if self._is_tuple else () if result is None else (result,)
        self._row_shapes = [array.shape[1:] for array in results]
        recorder.tape.finish([(array.ref, array.columns) for array in results])
        self._times: _native.RegionTimes | None = None

    def region_times(self) -> list[RegionTime]:
        """Of the last replay that was timed."""
        return [] if self._times is None else [RegionTime(*one) for one in self._times.tell()]

    def replay(self, args: Sequence[Any], *, timed: bool = False) -> Any:
        """The function's value for these arguments; it stays valid until the next replay."""
        inputs: list[np.ndarray] = []
        sizes = [0, 0]
        batch: HostBatch | None = None
        for arg in args:
            if isinstance(arg, NativeArray):
                values = arg.values
                is_index = values.dtype.kind == "i"
                inputs.append(values if is_index else values.reshape(len(values), -1))
                sizes[ROWS if is_index else TOKENS] = len(values)
            elif isinstance(arg, BatchContext):
                host = arg.host
                inputs += [host.token_ids, host.positions]
                batch = host
                sizes[TOKENS] = len(host.token_ids)
        if timed:
            outputs, self._times = self._tape.run(
                sizes[TOKENS], sizes[ROWS], inputs, batch, timed=True
            )
        else:
            outputs = self._tape.run(sizes[TOKENS], sizes[ROWS], inputs, batch)
        arrays = tuple(
            NativeArray.of(self._runtime, data.reshape(len(data), *row_shape))
            for data, row_shape in zip(outputs, self._row_shapes, strict=True)
        )
        return arrays if self._is_tuple else arrays[0] if arrays else None


class Recorded:
    """A function that is recorded at its first call with arguments of a kind, then replayed.

    timed: whether calls measure their regions.
    """

    def __init__(self, runtime: Runtime, function: Callable[..., Any]) -> None:
        self.timed = False
        self._runtime = runtime
        self._function = function
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._last: Recording | None = None

    def __call__(self, *args: Any) -> Any:
        key = tuple(_kind(arg) for arg in args)
        recording = self._recordings.get(key)
        if recording is None:
            recording = Recording(self._runtime, self._function, args)
            self._recordings[key] = recording
        self._last = recording
        return recording.replay(args, timed=self.timed)

    def region_times(self) -> list[RegionTime]:
        """Of the last call, which must have been timed."""
        return [] if self._last is None else self._last.region_times()


def _flows(arg: object) -> bool:
    return isinstance(arg, NativeArray | BatchContext)


def _symbolic(recorder: Recorder, arg: Any) -> Any:
    if isinstance(arg, NativeArray):
        return recorder.placeholder(arg)
    return recorder.batch_placeholder(arg) if isinstance(arg, BatchContext) else arg


def _kind(arg: object) -> object:
    """Arguments of equal kinds share a recording."""
    if isinstance(arg, NativeArray):
        return arg.values.dtype, arg.shape[1:]
    if isinstance(arg, BatchContext):
        return arg.kv_layers
    raise InvariantError(f"a recorded function takes arrays and contexts, not {type(arg)}")
