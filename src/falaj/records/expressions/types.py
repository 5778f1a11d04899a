"""The types of expressions: which operands a function takes, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from falaj.records.expressions.syntax import (
    COMPARISONS,
    Application,
    Constant,
    ExpressionError,
    Node,
    Variable,
)
from falaj.records.features import ColumnType

INTEGER, FLOAT, BOOLEAN = ColumnType.INTEGER, ColumnType.FLOAT, ColumnType.BOOLEAN
TEXT, MOMENT = ColumnType.TEXT, ColumnType.MOMENT
NUMERIC = frozenset({INTEGER, FLOAT, BOOLEAN})
"""What arithmetic takes: true counts as 1, false as 0."""
_WHOLE = frozenset({INTEGER, BOOLEAN})
_EXACT = frozenset({"+", "-", "*", "%", "min", "max", "abs", "negative", "round", "floor", "ceil"})
"""Functions that make an integer of integers; the other functions of numbers make floats."""


def type_of(node: Node, types: Mapping[str, ColumnType]) -> ColumnType:
    """Return the type of an expression over names of `types`. Raise ExpressionError where operands do not fit."""
    if isinstance(node, Constant):
        return _constant_type(node)
    if isinstance(node, Variable):
        if node.name not in types:
            close = get_close_matches(node.name, types, n=1)
            fix = f"did you mean {close[0]}?" if close else None
            known = ", ".join(list(types)[:20]) + (", …" if len(types) > 20 else "")
            raise ExpressionError(node.at, f"the name {node.name}", known or "no names", fix)
        return types[node.name]
    return _applied(node, [type_of(argument, types) for argument in node.arguments])


def require_feature_type(node: Node, types: Mapping[str, ColumnType]) -> ColumnType:
    """Return the type of an expression. Raise ExpressionError unless it is one that a model takes: a number."""
    found = type_of(node, types)
    if found not in NUMERIC:
        fix = "compare it, such as == 'a'" if found is TEXT else "take its hour() or weekday()"
        raise ExpressionError(node.at, f"a result of type {found}", "a number, or true or false", fix)
    return found


def guess_types(node: Node) -> dict[str, ColumnType]:
    """Return what the names of an expression have to be, as far as it tells: float where numbers are calculated with.

    It is for names that no table declares: an argument of `hour` is a moment, what is compared with a text is one, and
    a condition is a boolean.
    """
    found: dict[str, ColumnType] = {}
    _guess(node, FLOAT, found)
    return found


def _guess(node: Node, wanted: ColumnType, found: dict[str, ColumnType]) -> None:
    if isinstance(node, Variable):
        if wanted is not FLOAT or node.name not in found:
            found[node.name] = wanted
        return
    if isinstance(node, Constant):
        return
    if node.function in ("hour", "weekday"):
        kinds = [MOMENT]
    elif node.function in ("and", "or", "not"):
        kinds = [BOOLEAN] * len(node.arguments)
    elif node.function == "where":
        kinds = [BOOLEAN, wanted, wanted]
    elif node.function == "coalesce":
        kinds = [wanted] * len(node.arguments)
    else:
        kinds = [_partner_type(node)] * len(node.arguments)
    for argument, kind in zip(node.arguments, kinds, strict=True):
        _guess(argument, kind, found)


def _partner_type(node: Application) -> ColumnType:
    """Return what the names in a comparison are: texts if they are compared with one."""
    constants = [each.value for each in node.arguments if isinstance(each, Constant)]
    is_text = node.function in COMPARISONS and any(isinstance(value, str) for value in constants)
    is_flag = node.function in COMPARISONS and any(isinstance(value, bool) for value in constants)
    return TEXT if is_text else BOOLEAN if is_flag else FLOAT


def _constant_type(node: Constant) -> ColumnType:
    if isinstance(node.value, bool):
        return BOOLEAN
    if isinstance(node.value, str):
        return TEXT
    return INTEGER if isinstance(node.value, int) else FLOAT


def _applied(node: Application, kinds: Sequence[ColumnType]) -> ColumnType:
    function = node.function
    if function == "isnull":
        return BOOLEAN
    if function in ("hour", "weekday"):
        _require(node, kinds, frozenset({MOMENT}), "a moment")
        return INTEGER
    if function in ("and", "or", "not"):
        _require(node, kinds, frozenset({BOOLEAN}), "true or false", "compare it, such as x != 0")
        return BOOLEAN
    if function in COMPARISONS:
        return _compared(node, kinds)
    if function == "where":
        _require(node, kinds[:1], frozenset({BOOLEAN}), "a condition first", "compare it, such as x != 0")
        return _united(node, kinds[1:])
    if function == "coalesce":
        return _united(node, kinds)
    if function == "-" and set(kinds) == {MOMENT}:
        return FLOAT  # seconds
    _require(node, kinds, NUMERIC, "numbers")
    return INTEGER if function in _EXACT and _WHOLE.issuperset(kinds) else FLOAT


def _compared(node: Application, kinds: Sequence[ColumnType]) -> ColumnType:
    if NUMERIC.issuperset(kinds) or set(kinds) == {MOMENT}:
        return BOOLEAN
    if set(kinds) == {TEXT} and node.function in ("==", "!="):
        return BOOLEAN
    allowed = "two numbers or two moments" + ("" if node.function not in ("==", "!=") else ", or two texts")
    raise ExpressionError(node.at, f"{kinds[0]} {node.function} {kinds[1]}", allowed)


def _united(node: Application, kinds: Sequence[ColumnType]) -> ColumnType:
    """Return the one type of values of which one is chosen."""
    found = set(kinds)
    if len(found) == 1:
        return kinds[0]
    if found <= NUMERIC:
        return INTEGER if found <= _WHOLE else FLOAT
    raise ExpressionError(node.at, f"{' and '.join(kinds)} in {node.function}", "values of one type")


def _require(
    node: Application,
    kinds: Sequence[ColumnType],
    wanted: frozenset[ColumnType],
    allowed: str,
    fix: str | None = None,
) -> None:
    wrong = next((kind for kind in kinds if kind not in wanted), None)
    if wrong is not None:
        name = "the sign" if node.function == "negative" else node.function
        raise ExpressionError(node.at, f"{wrong} in {name}", allowed, fix)
