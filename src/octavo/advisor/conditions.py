"""The language of the rules' conditions: comparisons and arithmetic over named facts, nothing else.

    is_gpu and tp > 1 and link == "bus"
    weight_format in ("int4", "int8") and 1 < users_each <= 16

Python's own parser reads it; what isn't listed here is refused when the rules are loaded, so a
condition can neither call nor reach anything.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.errors import InvariantError

Value = bool | int | float | str | None

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Condition:
    """A condition that was read. A comparison of order with an unknown fact (None) is false."""

    def __init__(self, text: str) -> None:
        """Raises InvariantError for what is not in the language: rules come with the package."""
        self.text = text
        try:
            self._tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise InvariantError(f"the condition {text!r} can't be read: {error.msg}") from None
        self.names = frozenset(self._check(self._tree))

    def __repr__(self) -> str:
        return f"Condition({self.text!r})"

    def holds(self, facts: Mapping[str, Value]) -> bool:
        """facts: must have all of `names`."""
        return bool(_value(self._tree, facts))

    def _check(self, node: ast.AST) -> set[str]:
        """The names in it."""
        match node:
            case ast.Name(id=name):
                return {name}
            case ast.Constant(value=bool() | int() | float() | str()):
                return set()
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts):
                pass
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                parts = [operand]
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in _COMPARISONS for op in ops
            ):
                parts = [left, *others]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                parts = [left, right]
            case _:
                raise InvariantError(
                    f"the condition {self.text!r} has {type(node).__name__}, which is not in the "
                    "language of conditions"
                )
        return {name for part in parts for name in self._check(part)}


def _value(node: ast.AST, facts: Mapping[str, Value]) -> Any:
    match node:
        case ast.Name(id=name):
            return facts[name]
        case ast.Constant(value=value):
            return value
        case ast.Tuple(elts=parts):
            return tuple(_value(part, facts) for part in parts)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, facts) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, facts) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, facts)
        case ast.UnaryOp(operand=operand):
            value = _value(operand, facts)
            return None if value is None else -value
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _value(left, facts), _value(right, facts)
            if first is None or second is None:
                return None
            return _ARITHMETIC[type(op)](first, second)
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared(_value(left, facts), ops, others, facts)
    raise InvariantError(f"{ast.dump(node)} was not checked when it was read")


def _compared(
    left: Any, ops: list[ast.cmpop], others: list[ast.expr], facts: Mapping[str, Value]
) -> bool:
    for op, other in zip(ops, others, strict=True):
        right = _value(other, facts)
        is_unknown = left is None or right is None
        if (is_unknown and isinstance(op, _ORDERED)) or not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True
