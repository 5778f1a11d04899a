"""Feature lookup: assemble the model's input from views by key and from the other inputs of the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite, isnan, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.inference.protocol import FLOATS, InputTensor, read_values
from falaj.errors import Fault, shorten
from falaj.features.request_time.evaluation import ValueColumn, column_of, evaluate, request_column
from falaj.records.features import ColumnType, OnlineRow
from falaj.records.serving.lookups import MissingReason
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.dependencies import FeatureReader
from falaj.serving.lookups.joins import ComputedColumn, FeatureJoin, LookupMeter, ViewColumns
from falaj.serving.signatures import MAX_FAULTS, invalid_request
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

LISTED_GAPS = 50
"""Missing features that an answer or an error lists, by row and view."""

REQUEST, NOT_GIVEN, NOT_COMPUTED = "request", "not_given", "not_computed"
"""Stand in the metrics for features of the request that it left out, or whose expression has no value."""

_EXPLAINED = {
    MissingReason.UNKNOWN_KEY: "which {view} does not have",
    MissingReason.EXPIRED: "whose features in {view} are older than its ttl",
    MissingReason.STALE: "whose features in {view} are older than this endpoint allows",
    MissingReason.NULL: "whose value in {view} is null",
    MissingReason.NOT_ONLINE: "and {view} is not materialized with this feature",
}


class FeatureGap(NamedTuple):
    """Columns of one row that a view has no value for."""

    row: int
    part: ViewColumns
    key: str
    reason: MissingReason
    columns: tuple[int, ...]


class JoinedRows:
    """The model's input, and what the views lacked for it; of many gaps the first are kept, and the rows counted."""

    def __init__(self, join: FeatureJoin, rows: int, tensor: Tensor) -> None:
        self.join = join
        self._datatype = tensor.datatype
        is_float = tensor.datatype in FLOATS and not join.computed  # a double holds integers up to 2**53
        self.block: Array = np.empty((rows, len(join.columns)), np.float64 if is_float else np.object_)
        self.block[:] = None if join.computed else join.defaults  # expressions see what is missing
        self.gaps: list[FeatureGap] = []
        self.missing: Counter[tuple[str, str]] = Counter()
        """Values without a value of their own, by view and reason."""
        self.oldest: datetime | None = None
        """The event time of the oldest row that was used."""
        self._required = _required(join, tensor)
        self._refused: list[FeatureGap] = []
        self._rows: set[int] = set()

    @property
    def missing_rows(self) -> int:
        return len(self._rows)

    @property
    def age_s(self) -> float | None:
        """Return the age of the oldest feature that was used; a clock that is behind makes none negative."""
        if self.oldest is None:
            return None
        return max((datetime.now(UTC) - self.oldest).total_seconds(), 0.0)

    def add(self, gap: FeatureGap) -> None:
        self._rows.add(gap.row)
        self.missing[gap.part.name, gap.reason.value] += len(gap.columns)
        if len(self.gaps) < LISTED_GAPS:
            self.gaps.append(gap)
        if len(self._refused) < LISTED_GAPS and not self._required.isdisjoint(gap.columns):
            self._refused.append(gap)

    def check(self) -> None:
        """Raise InvalidInput if a required feature is missing, naming rows, keys and features."""
        faults = [self._fault(gap) for gap in self._refused]
        if faults:
            raise invalid_request(faults)

    def compute(self, given: Mapping[str, Array]) -> None:
        """Add the request-time features, and replace what is missing by the defaults. Raise InvalidInput."""
        join, rows = self.join, len(self.block)
        columns = _variables(join, self.block, given)
        found = evaluate([(each.name, each.expression) for each in join.computed], columns, rows)
        faults: list[Fault] = []
        results = {
            each.column: self._computed(each, found[each.name], faults)
            for each in join.computed
            if each.column is not None
        }
        if faults:
            raise invalid_request(faults[:MAX_FAULTS])
        for column in range(join.width):
            default = join.defaults[column]
            values = results.get(column) or self.block[:, column].tolist()
            self.block[:, column] = [default if value is None else value for value in values]
        self.block = self.block[:, : join.width]

    def _computed(self, each: ComputedColumn, found: ValueColumn, faults: list[Fault]) -> list[Any]:
        """Return the values of a column of the model; a fault if one is missing that has to be known."""
        values: list[Any] = found.values.tolist()
        missing = np.flatnonzero(found.is_missing).tolist()
        if not missing:
            return values
        for row in missing:
            values[row] = None
        self.missing[REQUEST, NOT_COMPUTED] += len(missing)
        self._rows.update(missing)
        if each.column in self._required:
            faults += [
                Fault(
                    where=f"row {row}, feature {each.name}",
                    given=f"no value of {shorten(each.expression)}",
                    allowed="inputs and features of which it can be computed",
                    fix="deploy --missing FEATURE=NUMBER gives a feature a default",
                )
                for row in missing[:MAX_FAULTS]
            ]
        return values

    def model_input(self) -> Array:
        """Return the block in the type of the model's input. Raise InvalidInput if an integer type lacks a value."""
        dtype = NUMPY[self._datatype]
        if self._datatype in FLOATS:
            return self.block.astype(np.float64, copy=False).astype(dtype)
        bounds = (0, 1) if self._datatype is Datatype.BOOL else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        faults = [
            self._not_whole(row, column, value)
            for (row, column), value in np.ndenumerate(self.block)
            if not isfinite(value) or value != int(value) or not bounds[0] <= value <= bounds[1]
        ]
        if faults:
            raise invalid_request(faults[:MAX_FAULTS])
        return self.block.astype(dtype)

    def _not_whole(self, row: int, column: int, value: object) -> Fault:
        allowed = f"a whole number that {self._datatype} holds, which is what the model takes"
        return Fault(
            where=f"row {row}, feature {self.join.columns[column]}", given=shorten(value), allowed=allowed
        )

    def _fault(self, gap: FeatureGap) -> Fault:
        names = ", ".join(self.join.columns[column] for column in gap.columns if column in self._required)
        why = _EXPLAINED[gap.reason].format(view=gap.part.name)
        return Fault(
            where=f"row {gap.row}, feature {names}",
            given=f"{' and '.join(gap.part.keys)} '{shorten(gap.key)}', {why}",
            allowed="a key with this feature, since the endpoint has no default for it",
            fix="deploy --missing FEATURE=NUMBER gives a feature a default",
        )


def has_model_input(given: Sequence[InputTensor], model: ServedModel) -> bool:
    """Return whether a request contains the model's input itself, so that no lookup is needed."""
    return len(given) == 1 and given[0].name == model.inputs[0].name


def join_rows(
    given: Sequence[InputTensor],
    join: FeatureJoin,
    tensor: Tensor,
    features: FeatureReader,
    meter: LookupMeter | None = None,
) -> JoinedRows:
    """Return the model's input with a row per value of the request's inputs. Raise InvalidInput with all faults."""
    return join_values(_read(given, join), join, tensor, features, meter)


def join_values(
    values: Mapping[str, Array],
    join: FeatureJoin,
    tensor: Tensor,
    features: FeatureReader,
    meter: LookupMeter | None = None,
) -> JoinedRows:
    """Return the model's input with a row for each of `values`, which have as many. Raise InvalidInput."""
    joined = JoinedRows(join, len(next(iter(values.values()))), tensor)
    for part in join.views:
        _fill(joined, part, features, _keys(part, values))
    if left_out := len(join.optional - values.keys()):
        joined.missing[REQUEST, NOT_GIVEN] += left_out * len(joined.block)
    for name, column in join.passed:
        if name in values:
            joined.block[:, column] = values[name]
    try:
        joined.check()
        if join.computed:
            joined.compute(values)
    finally:
        if meter is not None:
            meter.count(joined.missing, joined.age_s)
    joined.block = joined.model_input()
    return joined


def _variables(join: FeatureJoin, block: Array, given: Mapping[str, Array]) -> dict[str, ValueColumn]:
    """Return what the expressions are computed from, in their types. Raise InvalidInput with all faults."""
    found: dict[str, ValueColumn] = {}
    faults = []
    for each in join.variables:
        if each.column is None and each.name in given:
            try:
                found[each.name] = request_column(each.type, given[each.name])
            except (ValueError, OverflowError) as error:
                where, allowed = f"input '{shorten(each.name)}'", _WANTED[each.type]
                faults.append(Fault(where=where, given=shorten(str(error)), allowed=allowed))
        else:
            values = [None] * len(block) if each.column is None else block[:, each.column].tolist()
            found[each.name] = column_of(each.type, values)
    if faults:
        raise invalid_request(faults)
    return found


_WANTED = {
    ColumnType.FLOAT: "numbers",
    ColumnType.INTEGER: "whole numbers of 64 bits",
    ColumnType.BOOLEAN: "true or false, or 0 or 1",
    ColumnType.TEXT: "texts",
    ColumnType.MOMENT: "moments, like 2026-11-15T08:00:00Z, or microseconds since 1970",
}
"""What the inputs of a request may be that expressions use."""


def _required(join: FeatureJoin, tensor: Tensor) -> frozenset[int]:
    """Return the columns without a default: those that the endpoint requires, and NaN if the model takes integers."""
    if tensor.datatype in FLOATS:
        return join.required
    lacking = {column for column, value in enumerate(join.defaults[: join.width]) if isnan(value)}
    return join.required | lacking


def _fill(joined: JoinedRows, part: ViewColumns, features: FeatureReader, keys: Sequence[str]) -> None:
    """Fill in the features of each key; missing values keep their defaults, and are noted."""
    once = dict.fromkeys(keys)
    found = features.read(part.view, tuple(once))
    known = {name: place for place, name in enumerate(found.features)}
    places = [(known.get(name), column) for name, column in zip(part.features, part.columns, strict=True)]
    rows = dict(zip(once, found.rows, strict=True))
    fresh = None if part.max_age is None else datetime.now(UTC) - part.max_age
    used = [at for row in rows.values() if (at := _used_time(row, fresh)) is not None]
    if used:
        joined.oldest = min(used) if joined.oldest is None else min(joined.oldest, *used)
    block = joined.block
    for number, key in enumerate(keys):
        row = rows[key]
        is_stale = _is_before(row, fresh)
        gaps = None
        for place, column in places:
            value = None if place is None or is_stale else row.values[place]
            if value is not None:
                block[number, column] = value
            elif gaps is None:
                gaps = [column]
            else:
                gaps.append(column)
        if gaps is not None:
            reason = _reason(row, found.oldest, is_online=all(place is not None for place, _ in places))
            if is_stale and reason is not MissingReason.EXPIRED:
                reason = MissingReason.STALE
            joined.add(FeatureGap(number, part, key, reason, tuple(gaps)))


def _used_time(row: OnlineRow, fresh: datetime | None) -> datetime | None:
    """Return the event time of a row that has a value to use."""
    if _is_before(row, fresh) or all(value is None for value in row.values):
        return None
    return row.event_time


def _is_before(row: OnlineRow, moment: datetime | None) -> bool:
    return moment is not None and row.event_time is not None and row.event_time < moment


def _reason(row: OnlineRow, oldest: datetime | None, *, is_online: bool) -> MissingReason:
    if row.event_time is None:
        return MissingReason.UNKNOWN_KEY
    if oldest is not None and row.event_time < oldest:
        return MissingReason.EXPIRED
    return MissingReason.NULL if is_online else MissingReason.NOT_ONLINE


def _read(given: Sequence[InputTensor], join: FeatureJoin) -> Mapping[str, Array]:
    wanted, keys = join.inputs, {key for part in join.views for key in part.keys}
    known = frozenset(wanted)
    values: dict[str, Array] = {}
    faults: list[Fault] = []
    for tensor in given:
        if len(faults) == MAX_FAULTS:
            break
        where = f"input '{shorten(tensor.name)}'"
        if tensor.name not in known or tensor.name in values:
            allowed = f"each of the inputs {', '.join(wanted)} once"
            faults.append(Fault(where=where, given="an unknown or duplicate name", allowed=allowed))
            continue
        try:
            is_text = join.datatype_of(tensor.name) is Datatype.BYTES
            values[tensor.name] = _values(tensor, is_key=tensor.name in keys, is_text=is_text)
        except (ValueError, OverflowError) as error:
            kind = "text or whole numbers" if tensor.name in keys else "text" if is_text else "numbers"
            faults.append(Fault(where=where, given=shorten(str(error)), allowed=f"{kind}, one per row"))
    named = {tensor.name for tensor in given}
    faults += [
        Fault(where=f"input '{name}'", given="nothing", allowed="a key" if name in keys else "a feature")
        for name in wanted
        if name not in named and name not in join.optional
    ]
    if not faults and len({len(array) for array in values.values()}) > 1:
        shown = ", ".join(f"{name} {len(array)}" for name, array in values.items())
        faults.append(
            Fault(where="inputs", given=f"rows: {shown}", allowed="the same number of rows in each")
        )
    if faults:
        raise invalid_request(faults)
    return values


def _values(tensor: InputTensor, *, is_key: bool, is_text: bool) -> Array:
    """Return the values of an input, one per row. Raise ValueError if its type or shape is invalid."""
    datatype = Datatype(tensor.datatype)
    if is_key and (datatype in FLOATS or datatype is Datatype.BOOL):
        raise ValueError(f"datatype {datatype}")
    if datatype is Datatype.BYTES and not (is_key or is_text):
        raise ValueError("datatype BYTES")
    count = prod(tensor.shape)
    if not count or tensor.shape[0] != count:
        raise ValueError(f"shape {tensor.shape}")
    values = read_values(tensor, datatype, count)
    if datatype is Datatype.BYTES and any(type(value) is bytes for value in values.tolist()):
        raise ValueError("bytes that are not UTF-8")
    return values


def _keys(part: ViewColumns, values: Mapping[str, Array]) -> list[str]:
    """Return keys in the format of the online store: parts joined by '|' and escaped by a backslash."""
    if len(part.keys) == 1:
        return [str(value) for value in values[part.keys[0]].tolist()]
    columns = [[_escaped(value) for value in values[key].tolist()] for key in part.keys]
    return ["|".join(parts) for parts in zip(*columns, strict=True)]


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|")
