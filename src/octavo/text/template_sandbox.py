"""Jinja for chat templates, which come with models and are not trusted.

Jinja's immutable sandbox keeps a template away from Python; this environment also bounds what it
can use, by the rules of template_meter.py. Jinja gives no hook inside loops, string joins, lists
and comparisons, so the parsed template is rewritten: every loop and macro body starts with a step
of the meter, all that is built passes through it, and what may take a while looks at the clock.
Filters and methods that can blow a value up are either checked before they run or not offered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from octavo.text.template_filters import TEMPLATE_FILTERS, check_format, check_replace, join
from octavo.text.template_meter import (
    MAX_WIDTH,
    charge,
    check_bits,
    check_repeated,
    check_value,
    check_width,
    meter,
)

_GLOBALS = ("range", "dict", "cycler", "joiner")
_REFUSED_METHODS = frozenset(
    {
        "center", "encode", "expandtabs", "format_map", "from_bytes", "ljust", "maketrans", "rjust",
        "to_bytes", "translate", "zfill",
    }
)  # fmt: skip
# Their time is the product of both texts' lengths.
_SLOW_METHODS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
# Names with a space: no template can call them.
_STEP, _CHARGE, _CONCAT, _CLOCK = "meter step", "meter charge", "meter concat", "meter clock"


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    """Sees every piece of text that is written, also inside macros and {% set %} blocks."""
    text = str(value)
    meter().write(len(text))
    return text


def _step(value: Any) -> Any:
    meter().step()
    return value


def _clock(value: Any) -> Any:
    meter().check_time()
    return value


def _concat(values: Sequence[Any]) -> str:
    check_value(values)
    text: str = charge("".join(map(str, values)))
    return text


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_WIDTH or re.search(r"\d{3}", pattern):
        raise SecurityError("strftime_now got a format that is too long in the chat template")
    return datetime.now().strftime(pattern)


class _Namespace(Namespace):
    """Values may grow after the namespace was put into a list: it does not print them."""

    def __repr__(self) -> str:
        return "<Namespace>"


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
        if node.test is not None:  # runs for items that never reach the body
            node.test = _filter(node.test, _CLOCK)
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

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CHARGE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CHARGE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CHARGE) if node.ctx == "load" else node  # or it is assigned to

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CLOCK)

    def _with_step(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        nothing = nodes.Const(None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter(nothing, _STEP), lineno=node.lineno))
        return node


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _clocked(test: Any) -> Any:
    @functools.wraps(test)  # keeps the marks that tell jinja what to pass
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _clock(test(*args, **kwargs))

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
            optimized=False,  # which would evaluate constants where no meter runs
        )
        self.filters = {
            **TEMPLATE_FILTERS, _STEP: _step, _CHARGE: charge, _CONCAT: _concat, _CLOCK: _clock
        }  # fmt: skip
        self.tests = {name: _clocked(test) for name, test in self.tests.items()}
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def parse_unmetered(self, source: str) -> nodes.Template:
        """The template as written, to look at. Raises jinja2.TemplateSyntaxError."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def getitem(self, obj: Any, argument: Any) -> Any:
        meter().check_time()  # filters look up long paths for many items
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", str() | list() | tuple(), int():
                check_repeated(left, right)
            case "*", int(), str() | list() | tuple():
                check_repeated(right, left)
            case "*", int(), int():
                check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                check_bits(left.bit_length() * max(right, 1))
            case "%", str(), _:
                check_format(left, "%", [right])
        return charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names begin with underscores, as jinja's do, so that templates may use any keyword.
        check_value((args, kwargs))  # a macro sees them as lists: varargs and kwargs
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            match getattr(__obj, "__name__", None):
                case "replace" if len(args) >= 2:
                    check_replace(owner, str(args[0]), str(args[1]))
                case "join" if args:
                    return charge(join(args[0], owner))
                case name if name in _SLOW_METHODS:
                    for arg in (*args, *kwargs.values()):
                        check_width(len(str(arg)))
        return charge(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map, sandboxed by jinja and sized here."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None
        pattern: str = value.__self__

        def wrapper(*args: Any, **kwargs: Any) -> str:
            check_format(pattern, "{", [*args, *kwargs.values()])
            return sandboxed(*args, **kwargs)

        return wrapper

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)
