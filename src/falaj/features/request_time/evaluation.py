"""The evaluation of expressions over columns, the same for the rows of a training set and those of a request.

A value does not depend on the rows beside it: operations are those of IEEE 754, which every machine rounds alike, and
`exp`, `log`, `log1p` and `**` are those of the C library, one value at a time. NumPy's own versions of these depend on
the vector instructions of the machine (decision 0045).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.records.expressions.syntax import COMPARISONS, Application, Constant, Node, Variable, parse
from falaj.records.expressions.types import BOOLEAN, FLOAT, INTEGER, MOMENT, TEXT
from falaj.records.features import ColumnType

Array = npt.NDArray[Any]

DTYPES: dict[ColumnType, Any] = {
    INTEGER: np.dtype(np.int64),
    FLOAT: np.dtype(np.float64),
    BOOLEAN: np.dtype(np.bool_),
    TEXT: np.dtype(np.object_),
    MOMENT: np.dtype(np.int64),
}
"""Moments are microseconds since 1970 in UTC."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000
_THURSDAY = 3
"""The day of the week of 1970-01-01, where Monday is 0."""
SHORT = 16
"""Constants of requests with up to so many rows are kept."""
_SAFE_PRODUCT = 2.0**62
_LARGEST_EXPONENT = math.log(1.7976931348623157e308)


@dataclass(frozen=True, slots=True)
class ValueColumn:
    """Values of one type, and which of them are missing; a missing float is NaN, and has no mask."""

    type: ColumnType
    values: Array
    missing: Array | None = None

    @property
    def is_missing(self) -> Array:
        """Return for each value whether it is missing."""
        if self.type is FLOAT:
            return np.isnan(self.values)
        return np.zeros(len(self.values), np.bool_) if self.missing is None else self.missing


def evaluate(
    expressions: Iterable[tuple[str, str]], columns: Mapping[str, ValueColumn], rows: int
) -> dict[str, ValueColumn]:
    """Return the values of expressions, by their names, for each of `rows` rows; later ones may use earlier ones.

    Their types were checked.
    """
    known, found = dict(columns), {}
    with np.errstate(all="ignore"):
        for name, expression in expressions:
            known[name] = found[name] = _with_one_nan(_value(parse(expression), known, rows))
    return found


def _with_one_nan(column: ValueColumn) -> ValueColumn:
    """Return a column in which all NaN have the same bits; operations make several."""
    if column.type is not FLOAT:
        return column
    unknown = np.isnan(column.values)
    return ValueColumn(FLOAT, np.where(unknown, math.nan, column.values)) if unknown.any() else column


def column_of(kind: ColumnType, values: Sequence[Any]) -> ValueColumn:
    """Return Python values as a column; None is missing. Raise ValueError or OverflowError if they do not fit."""
    if kind is FLOAT:
        return ValueColumn(FLOAT, np.array([math.nan if v is None else v for v in values], np.float64))
    if kind is INTEGER and not all(value is None or isinstance(value, int) for value in values):
        raise ValueError("numbers that are not whole")
    missing = np.array([value is None for value in values], np.bool_)
    empty: Any = "" if kind is TEXT else 0
    found = np.array([empty if value is None else value for value in values], DTYPES[kind])
    return ValueColumn(kind, found, missing if missing.any() else None)


def request_column(kind: ColumnType, values: Array) -> ValueColumn:
    """Return an input of a request as a column of a type. Raise ValueError or OverflowError if it does not fit."""
    if kind is TEXT:
        if values.dtype != np.object_:
            raise ValueError("numbers")
        return ValueColumn(TEXT, values)
    if values.dtype == np.object_:
        read = _moment if kind is MOMENT else int if kind is INTEGER else float
        values = np.array(
            [read(value) for value in values.tolist()], DTYPES[kind] if kind is MOMENT else None
        )
    if kind is FLOAT:
        return ValueColumn(FLOAT, values.astype(np.float64))
    missing = None
    if values.dtype.kind == "f":
        missing = np.isnan(values)
        values = np.where(missing, 0, values)
        whole = (values == np.rint(values)) & (np.abs(values) < 2.0**63)
        if not whole.all():
            raise ValueError(f"{values[~whole][0]}")
    if values.dtype.kind not in "fiub" or (values.dtype.kind == "u" and (values > 2**63 - 1).any()):
        raise OverflowError("a number of more than 64 bits")
    if kind is BOOLEAN and values.dtype.kind != "b" and not np.isin(values, (0, 1)).all():
        raise ValueError("numbers other than 0 and 1")
    return ValueColumn(
        kind, values.astype(DTYPES[kind]), missing if missing is not None and missing.any() else None
    )


def _moment(text: str) -> int:
    """Return a moment in microseconds since 1970; one without a zone is in UTC, as it is for training."""
    found = datetime.fromisoformat(text)
    aware = found.replace(tzinfo=UTC) if found.tzinfo is None else found
    return (aware - EPOCH) // timedelta(microseconds=1)


def _value(node: Node, columns: Mapping[str, ValueColumn], rows: int) -> ValueColumn:
    if isinstance(node, Variable):
        return columns[node.name]
    if isinstance(node, Constant):
        return _short_constant(node, rows) if rows <= SHORT else _constant(node, rows)
    arguments = [_value(argument, columns, rows) for argument in node.arguments]
    return _apply(node, arguments)


@lru_cache(maxsize=1024)
def _short_constant(node: Constant, rows: int) -> ValueColumn:
    return _constant(node, rows)


def _constant(node: Constant, rows: int) -> ValueColumn:
    value = node.value
    if isinstance(value, bool):
        return ValueColumn(BOOLEAN, np.full(rows, value, np.bool_))
    if isinstance(value, str):
        return ValueColumn(TEXT, np.full(rows, value, np.object_))
    if isinstance(value, int):
        return ValueColumn(INTEGER, np.full(rows, value, np.int64))
    return ValueColumn(FLOAT, np.full(rows, value, np.float64))


def _apply(node: Application, arguments: Sequence[ValueColumn]) -> ValueColumn:
    function = node.function
    if function in COMPARISONS:
        return _compared(function, *arguments)
    if function in ("and", "or"):
        return _connected(function, *arguments)
    if function in _ARITHMETIC:
        return _calculated(function, *arguments)
    if function in _EXACT:
        return _rounded(function, arguments[0])
    if function in _BY_LIBRARY:
        values = _floats(arguments[0])
        return ValueColumn(FLOAT, _by_library(_BY_LIBRARY[function], values))
    found: ValueColumn = _OTHERS[function](*arguments)
    return found


# ----------------------------------------------------------------------------------------- arithmetic


def _floats(column: ValueColumn) -> Array:
    """Return a column of numbers as floats, in which the missing are NaN; an integer becomes the nearest float."""
    if column.type is FLOAT:
        return column.values
    values = column.values.astype(np.float64)
    if column.missing is not None:
        values[column.missing] = math.nan
    return values


def _either(one: ValueColumn, other: ValueColumn) -> Array | None:
    """Return where one of two columns that are no floats is missing."""
    if one.missing is None or other.missing is None:
        return one.missing if other.missing is None else other.missing
    found: Array = one.missing | other.missing
    return found


def _calculated(function: str, one: ValueColumn, other: ValueColumn) -> ValueColumn:
    if one.type is MOMENT:  # a difference, in seconds
        seconds = (one.values - other.values) / 1e6
        missing = _either(one, other)
        return ValueColumn(FLOAT, seconds if missing is None else np.where(missing, math.nan, seconds))
    is_exact = FLOAT not in (one.type, other.type) and function in _WHOLE_NUMBERS
    if not is_exact:
        return ValueColumn(FLOAT, _ARITHMETIC[function](_floats(one), _floats(other)))
    left, right = one.values.astype(np.int64), other.values.astype(np.int64)
    values, overflown = _WHOLE_NUMBERS[function](left, right)
    missing = _either(one, other)
    if overflown is not None and overflown.any():
        missing = overflown if missing is None else missing | overflown
    return ValueColumn(INTEGER, values, missing)


def _sum(one: Array, other: Array) -> tuple[Array, Array]:
    values = one + other
    return values, ((one ^ values) & (other ^ values)) < 0


def _difference(one: Array, other: Array) -> tuple[Array, Array]:
    values = one - other
    return values, ((one ^ other) & (one ^ values)) < 0


def _product(one: Array, other: Array) -> tuple[Array, Array | None]:
    values = one * other
    large = np.abs(one.astype(np.float64) * other.astype(np.float64)) >= _SAFE_PRODUCT
    if not large.any():
        return values, None
    exact = one[large].astype(np.object_) * other[large].astype(np.object_)
    large[large] = (exact > 2**63 - 1) | (exact < -(2**63))
    return values, large


def _remainder(one: Array, other: Array) -> tuple[Array, Array]:
    divisor = np.where(
        (other == 0) | (other == -1), 1, other
    )  # the remainder by -1 is 0, and -2**63 % -1 traps
    return np.mod(one, divisor), other == 0


def _smaller(one: Array, other: Array) -> Array:
    """Return the smaller of two floats, or NaN; of 0 and -0, NumPy's own takes the one or the other."""
    return np.where((other < one) | np.isnan(other), other, one)


def _larger(one: Array, other: Array) -> Array:
    return np.where((other > one) | np.isnan(other), other, one)


def _power(one: Array, other: Array) -> Array:
    pairs = zip(one.tolist(), other.tolist(), strict=True)
    return np.array([_one_power(base, exponent) for base, exponent in pairs], np.float64)


def _one_power(base: float, exponent: float) -> float:
    try:
        return math.nan if base != base or exponent != exponent else math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf
    except ValueError:  # of a negative number, or 0 ** -1
        return math.inf if base == 0 else math.nan


def _by_library(function: Callable[[float], float], values: Array) -> Array:
    return np.array([function(value) for value in values.tolist()], np.float64)


def _log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def _log1p(value: float) -> float:
    if value > -1:
        return math.log1p(value)
    return -math.inf if value == -1 else math.nan


def _exp(value: float) -> float:
    return math.inf if value > _LARGEST_EXPONENT else math.exp(value)


def _rounded(function: str, column: ValueColumn) -> ValueColumn:
    """Return the result of a function that keeps integers exact."""
    if column.type is FLOAT:
        return ValueColumn(FLOAT, _EXACT[function](column.values))
    values, missing = column.values.astype(np.int64), column.missing
    if function not in ("abs", "negative"):
        return ValueColumn(INTEGER, values, missing)
    lowest = values == -(2**63)  # which has no positive counterpart
    if lowest.any():
        missing = lowest if missing is None else missing | lowest
    return ValueColumn(INTEGER, _EXACT[function](values), missing)


# --------------------------------------------------------------------------- comparisons and conditions


def _compared(function: str, one: ValueColumn, other: ValueColumn) -> ValueColumn:
    compare = _COMPARE[function]
    if one.type is TEXT or one.type is MOMENT or FLOAT not in (one.type, other.type):
        return ValueColumn(BOOLEAN, compare(one.values, other.values).astype(np.bool_), _either(one, other))
    left, right = _floats(one), _floats(other)
    missing = np.isnan(left) | np.isnan(right)
    return ValueColumn(BOOLEAN, compare(left, right), missing if missing.any() else None)


def _connected(function: str, one: ValueColumn, other: ValueColumn) -> ValueColumn:
    """Return one `and` or `or` the other: what decides alone does so although the other is missing."""
    values = one.values & other.values if function == "and" else one.values | other.values
    missing = _either(one, other)
    if missing is None:
        return ValueColumn(BOOLEAN, values)
    decisive = function == "or"
    decided = (~one.is_missing & (one.values == decisive)) | (~other.is_missing & (other.values == decisive))
    return ValueColumn(BOOLEAN, np.where(decided, decisive, values), missing & ~decided)


def _negated(column: ValueColumn) -> ValueColumn:
    return ValueColumn(BOOLEAN, ~column.values, column.missing)


def _is_null(column: ValueColumn) -> ValueColumn:
    return ValueColumn(BOOLEAN, column.is_missing)


def _united(columns: Sequence[ValueColumn]) -> list[ValueColumn]:
    """Return columns in the one type of values of which one is chosen."""
    kinds = {column.type for column in columns}
    if len(kinds) == 1:
        return list(columns)
    if FLOAT in kinds:
        return [ValueColumn(FLOAT, _floats(column)) for column in columns]
    return [ValueColumn(INTEGER, column.values.astype(np.int64), column.missing) for column in columns]


def _chosen(condition: ValueColumn, one: ValueColumn, other: ValueColumn) -> ValueColumn:
    one, other = _united([one, other])
    values = np.where(condition.values, one.values, other.values)
    if one.type is FLOAT:
        if condition.missing is not None:
            values = np.where(condition.missing, math.nan, values)
        return ValueColumn(FLOAT, values)
    missing = np.where(condition.values, one.is_missing, other.is_missing) | condition.is_missing
    return ValueColumn(one.type, values, missing if missing.any() else None)


def _first_known(*columns: ValueColumn) -> ValueColumn:
    first, *others = _united(columns)
    values, missing = first.values, first.is_missing
    for each in others:
        values = np.where(missing, each.values, values)
        missing = missing & each.is_missing
    is_float = first.type is FLOAT
    return ValueColumn(first.type, values, None if is_float or not missing.any() else missing)


def _folded(function: str, columns: Sequence[ValueColumn]) -> ValueColumn:
    found = columns[0]
    for each in columns[1:]:
        found = _calculated(function, found, each)
    return found


def _hour(column: ValueColumn) -> ValueColumn:
    return ValueColumn(INTEGER, np.mod(column.values, _DAY_US) // _HOUR_US, column.missing)


def _weekday(column: ValueColumn) -> ValueColumn:
    return ValueColumn(INTEGER, np.mod(column.values // _DAY_US + _THURSDAY, 7), column.missing)


_ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.mod,
    "**": _power,
    "smaller": _smaller,
    "larger": _larger,
}
_WHOLE_NUMBERS: dict[str, Callable[[Array, Array], tuple[Array, Array | None]]] = {
    "+": _sum,
    "-": _difference,
    "*": _product,
    "%": _remainder,
    "smaller": lambda one, other: (np.minimum(one, other), None),
    "larger": lambda one, other: (np.maximum(one, other), None),
}
_EXACT: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "negative": np.negative,
    "round": np.rint,
    "floor": np.floor,
    "ceil": np.ceil,
}
_BY_LIBRARY: dict[str, Callable[[float], float]] = {"exp": _exp, "log": _log, "log1p": _log1p}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
_OTHERS: dict[str, Callable[..., ValueColumn]] = {
    "not": _negated,
    "isnull": _is_null,
    "where": _chosen,
    "coalesce": _first_known,
    "min": lambda *columns: _folded("smaller", columns),
    "max": lambda *columns: _folded("larger", columns),
    "sqrt": lambda column: ValueColumn(FLOAT, np.sqrt(_floats(column))),
    "hour": _hour,
    "weekday": _weekday,
}
