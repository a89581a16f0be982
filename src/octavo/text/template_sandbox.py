"""Jinja for chat templates, which come with models and are not trusted.

Jinja's immutable sandbox keeps a template away from Python; this environment also bounds what it
can use: loop steps, time, text built, and the size of any one value. Jinja gives no hook inside
loops and string joins, so the parsed template is rewritten: every loop and macro body starts with a
step of the meter, and all text that is written, joined or sliced passes through it. Filters and
methods that can blow a value up are either checked before they run or not offered.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_replace
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Loop iterations and macro calls in one rendering."""
MAX_SECONDS = 5.0
"""Time for one rendering; looked at with every step and every piece of text."""
MAX_CHARS = 1 << 24
"""Characters of one value, and characters written in one rendering."""
MAX_CHARS_BUILT = 1 << 28
"""Characters of all the values that one rendering builds."""
_ELEMENT_CHARS = 16  # what an element of a list counts as: no list is longer than a million
_MAX_INT_BITS = 4096
_MAX_PADDING = 256  # widths and indents

_FILTERS = frozenset(
    [
        "abs",
        "bool",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "format",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "truncate",
        "unique",
        "upper",
        "urlencode",
        "wordcount",
    ]
)
_GLOBALS = frozenset({"range", "dict", "cycler", "joiner", "namespace"})
_REFUSED_STR_METHODS = frozenset(
    {
        "center",
        "encode",
        "expandtabs",
        "format_map",
        "ljust",
        "maketrans",
        "rjust",
        "translate",
        "zfill",
    }
)
# Names with a space: no template can call them.
_STEP, _CHARGE, _CONCAT = "meter step", "meter charge", "meter concat"


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
        self._check_time()

    def build(self, chars: int) -> None:
        self.built += chars
        if self.built > MAX_CHARS_BUILT:
            raise SecurityError(f"the chat template built more than {MAX_CHARS_BUILT} characters")
        self._check_time()

    def write(self, chars: int) -> None:
        self.written += chars
        if self.written > MAX_CHARS:
            raise SecurityError(f"the chat template wrote more than {MAX_CHARS} characters")
        self._check_time()

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise SecurityError(f"the chat template ran for more than {MAX_SECONDS:g} seconds")


_meter: ContextVar[_Meter] = ContextVar("template_meter")


@contextmanager
def metered() -> Iterator[None]:
    """Everything rendered inside counts as one rendering."""
    token = _meter.set(_Meter())
    try:
        yield
    finally:
        _meter.reset(token)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"a value in the chat template is larger than {MAX_CHARS} characters")


def _size(value: Any) -> int:
    """Size of a value's own memory in characters, elements not included."""
    if isinstance(value, str):
        return len(value)
    return len(value) * _ELEMENT_CHARS if isinstance(value, list | tuple | dict) else 0


def _charge(value: Any) -> Any:
    """Counts a value that the template has built; gives it back."""
    size = _size(value)
    _check_size(size)
    if (meter := _meter.get(None)) is not None:  # None while jinja folds constants
        meter.build(size)
    return value


def _check_printable(value: Any, indent: int = 0) -> None:
    """Refuses a value whose text would be too long, before it is made.

    A list may hold one large string, or one large list, many times.
    """
    size = 0
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        size += _size(item) + depth * indent
        _check_size(size)
        if isinstance(item, Mapping):
            pending.extend((child, depth + 1) for pair in item.items() for child in pair)
        elif isinstance(item, list | tuple):
            pending.extend((child, depth + 1) for child in item)


def _check_format(pattern: str, opener: str, values: Sequence[Any]) -> None:
    if re.search(r"\d{4}|\*|\{[^{}]*\{", pattern):
        raise SecurityError(
            "a format in the chat template has a width of 1000 or more, or a computed one"
        )
    _check_printable(values)
    _check_size(len(pattern) + pattern.count(opener) * sum(len(str(value)) for value in values))


@jinja2.pass_context
def _step(context: Context, value: Any) -> Any:
    _meter.get().step()
    return value


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Sees every piece of text that is written, also inside macros and {% set %} blocks."""
    _check_printable(value)
    text = str(value)
    _meter.get().write(len(text))
    return text


def _concat(values: Sequence[Any]) -> str:
    _check_printable(values)
    text = "".join(map(str, values))
    _charge(text)
    return text


@jinja2.pass_eval_context
def _replace(
    context: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None
) -> Any:
    _check_replace(str(s), str(old), str(new))
    return do_replace(context, s, str(old), str(new), count)


def _check_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _join(value: Any, d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise SecurityError("join(attribute=…) is not available in chat templates; use map first")
    items = list(value)
    _check_printable(items)
    _check_size(len(items) * len(str(d)))
    return str(d).join(map(str, items))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value), "%", [*args, *kwargs.values()])
    return str(str(value) % (kwargs or args))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    prefix = len(width) if isinstance(width, str) else width
    if prefix > _MAX_PADDING:
        raise SecurityError(f"an indent in the chat template is wider than {_MAX_PADDING}")
    _check_size(len(s) + (s.count("\n") + 1) * prefix)
    return do_indent(s, width, first, blank)


def _string(value: Any) -> str:
    _check_printable(value)
    return str(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as models were trained on (jinja's own filter escapes for HTML)."""
    if indent is not None and not 0 <= int(indent) <= 16:
        raise SecurityError("tojson(indent=…) must be 0 to 16 in chat templates")
    if separators is not None and sum(map(len, separators)) > 16:
        raise SecurityError(
            "tojson(separators=…) must have 16 characters at most in chat templates"
        )
    _check_printable(value, indent or 0)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_PADDING or re.search(r"\d{3}", pattern):
        raise SecurityError("strftime_now got a format that is too long in the chat template")
    return datetime.now().strftime(pattern)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant says, for training; here it is
    its body.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Puts the meter into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's naming
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._with_step(node)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)  # constants are finalized at run time

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CHARGE) if isinstance(node.arg, nodes.Slice) else node

    def _with_step(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        nothing = nodes.Const(None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter(nothing, _STEP), lineno=node.lineno))
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the marks that tell jinja what to pass
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _charge(function(*args, **kwargs))

    return wrapper


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as transformers does (trimmed blocks, loop controls), with bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=_finalize,
        )
        own = {
            "format": _format, "indent": _indent, "join": _join, "replace": _replace,
            "string": _string, "tojson": _tojson,
        }  # fmt: skip
        allowed = {name: self.filters[name] for name in _FILTERS if name in self.filters}
        self.filters = {name: _charged(function) for name, function in (allowed | own).items()}
        self.filters |= {_STEP: _step, _CHARGE: _charge, _CONCAT: _concat}
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def parse_unmetered(self, source: str) -> nodes.Template:
        """The template as written, to look at. Raises jinja2.TemplateSyntaxError."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", str() | list() | tuple(), int():
                _check_size(_size(left) * right)
            case "*", int(), str() | list() | tuple():
                _check_size(left * _size(right))
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                _check_bits(left.bit_length() * max(right, 1))
            case "%", str(), _:
                _check_format(left, "%", [right])
        return _charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names begin with underscores, as jinja's do, so that templates may use any keyword.
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            match getattr(__obj, "__name__", None):
                case "replace" if len(args) >= 2:
                    _check_replace(owner, str(args[0]), str(args[1]))
                case "join" if args:
                    return _charge(_join(args[0], owner))
        return _charge(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map, sandboxed by jinja and sized here."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None
        pattern: str = value.__self__

        def wrapper(*args: Any, **kwargs: Any) -> str:
            _check_format(pattern, "{", [*args, *kwargs.values()])
            return sandboxed(*args, **kwargs)

        return wrapper

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise SecurityError(f"a number in the chat template has more than {_MAX_INT_BITS} bits")
