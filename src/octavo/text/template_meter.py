"""What one rendering of a chat template may use, and how it is measured.

The rule that keeps C code short: no value that a template builds is larger than MAX_CHARS when it
is written out, or nests deeper than MAX_DEPTH. A list that holds one list twice counts it twice, so
values stay small for whatever walks through them: a comparison, a hash, a printed or sorted list.
What is left is many such operations, and each looks at the clock.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

MAX_STEPS = 1_000_000
"""Loop iterations and macro calls in one rendering."""
MAX_SECONDS = 5.0
"""Time for one rendering."""
MAX_CHARS = 1 << 22
"""Characters of one value, all that it holds included."""
MAX_CHARS_WRITTEN = 1 << 24
"""Characters written in one rendering; what a macro writes counts again where it is used."""
MAX_CHARS_BUILT = 1 << 28
"""Characters of all the values that one rendering builds."""
MAX_DEPTH = 128
"""Levels of lists in lists: C code recurses into them, some of it without a check."""
MAX_WIDTH = 256
"""Widths, indents, digits, and characters that a text is stripped of."""
_ELEMENT_CHARS = 16  # what an element of a list counts as: none is longer than 2**18
_MAX_INT_BITS = 4096
_CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)


class _Meter:
    """What one rendering has used so far."""

    def __init__(self) -> None:
        self.steps = 0
        self.built = 0
        self.written = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"the chat template ran more than {MAX_STEPS} loop steps")
        self.check_time()

    def build(self, chars: int) -> None:
        self.built += chars
        if self.built > MAX_CHARS_BUILT:
            raise SecurityError(f"the chat template built more than {MAX_CHARS_BUILT} characters")
        self.check_time()

    def write(self, chars: int) -> None:
        self.written += chars
        if self.written > MAX_CHARS_WRITTEN:
            raise SecurityError(f"the chat template wrote more than {MAX_CHARS_WRITTEN} characters")
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise SecurityError(f"the chat template ran for more than {MAX_SECONDS:g} seconds")


_meter: ContextVar[_Meter] = ContextVar("template_meter")
meter = _meter.get
"""That of the rendering at hand."""


@contextmanager
def metered() -> Iterator[None]:
    """Everything rendered inside counts as one rendering."""
    token = _meter.set(_Meter())
    try:
        yield
    finally:
        _meter.reset(token)


def charge(value: Any) -> Any:
    """Counts a value that the template has built; gives it back."""
    check_value(value)
    meter().build(_own_size(value))
    return value


def check_size(chars: int) -> None:
    if chars > MAX_CHARS:
        raise SecurityError(f"a value in the chat template is larger than {MAX_CHARS} characters")


def check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise SecurityError(f"a number in the chat template has more than {_MAX_INT_BITS} bits")


def check_width(number: int) -> None:
    if abs(number) > MAX_WIDTH:
        raise SecurityError(
            f"a width, an indent, digits or an argument of strip exceed {MAX_WIDTH} in the chat "
            "template"
        )


def check_iterable(value: Any) -> None:
    """Refuses to take a text apart that has more characters than a list may have elements."""
    if isinstance(value, str):
        check_size(len(value) * _ELEMENT_CHARS)


def check_repeated(value: Any, count: int) -> None:
    check_size(_own_size(value) * count)


def check_value(value: Any, indent: int = 0) -> None:
    """Refuses a value that is too large when written out (at `indent` per level), or too deep."""
    size = 0
    level = [value]
    for depth in range(MAX_DEPTH):
        below: list[Any] = []
        size += len(level) * depth * indent
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, int):
                check_bits(item.bit_length())
            elif isinstance(item, _CONTAINERS):
                size += len(item) * _ELEMENT_CHARS
                check_size(size)  # before it is taken apart
                below += item
                if isinstance(item, dict):
                    below += item.values()
        check_size(size)
        if not below:
            return
        level = below
    raise SecurityError(f"a value in the chat template nests deeper than {MAX_DEPTH} levels")


def _own_size(value: Any) -> int:
    """Size of a value's own memory in characters, elements not included."""
    if isinstance(value, str):
        return len(value)
    return len(value) * _ELEMENT_CHARS if isinstance(value, _CONTAINERS) else 0
