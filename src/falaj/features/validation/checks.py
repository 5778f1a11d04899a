"""Check rows that come in against the rules of their view. This code runs in the parser process.

Other modules import this one inside functions, because pyarrow is slow to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from falaj.errors import Fault, InvalidInput, shorten
from falaj.features.arrow_tables import TYPES, converted
from falaj.features.validation.conversion import (
    SHOWN_ROWS,
    cast_column,
    inconvertible_rows,
    row_numbers,
    shown_rows,
    type_name,
)
from falaj.ports.queries import ArrowTable
from falaj.records.features import BrokenRule, ColumnType, Feature, InvalidRows, RowRule
from falaj.records.record import Record

ROW, BROKEN = "__row", "__broken"
"""Columns of a quarantined row beside those of its view: its number in the file, and the rules that it breaks."""
BROKEN_TYPE = pa.list_(pa.struct([("rule", pa.string()), ("column", pa.string())]))
SHOWN_WORDS = 200


class RowRules(Record):
    """The columns of a view, and the rules that rows which come in obey.

    Event times must not be later than `latest`, and the newest not earlier than `fresh_since`. `unique` are the columns
    that two rows must not both have in common. If `invalid_rows` is "quarantine", up to `max_invalid_share` of the rows
    may be invalid.
    """

    columns: tuple[Feature, ...]
    required: tuple[str, ...] = ()
    event_time: str | None = None
    latest: datetime | None = None
    fresh_since: datetime | None = None
    unique: tuple[str, ...] = ()
    invalid_rows: InvalidRows = InvalidRows.REFUSE
    max_invalid_share: float = 1.0


class CheckedRows(NamedTuple):
    """The valid rows in the types of their columns; the invalid ones as they came, if there are any, and why."""

    rows: ArrowTable
    invalid: ArrowTable | None = None
    broken: tuple[BrokenRule, ...] = ()


class _Breach(NamedTuple):
    """The rows (positions, ascending) that break a rule, the values of its column as they came, and what is allowed."""

    rule: RowRule
    column: str
    rows: Any
    values: Any
    allowed: str


def conform(
    rows: ArrowTable, columns: tuple[Feature, ...], *, required: frozenset[str], where: str
) -> ArrowTable:
    """Return `columns` of `rows` cast to their types. Raise InvalidInput with all faults; `required` allow no nulls."""
    return check_rows(rows, RowRules(columns=columns, required=tuple(required)), where=where).rows


def check_rows(
    rows: ArrowTable, rules: RowRules, *, where: str, numbers: Any = None, repeated: Any = None
) -> CheckedRows:
    """Return the valid rows in the types of their columns, and the invalid ones apart.

    Raise InvalidInput with all faults if the file is to be refused: for its columns, for what it is as a whole, or for
    more invalid rows than the rules allow. `numbers` are those of the rows in their file; `repeated` are the positions
    of rows that were found to repeat others of it.
    """
    faults: list[Fault] = []
    breaches: list[_Breach] = []
    found: dict[str, Any] = {}
    for column in rules.columns:
        values = _single_column(rows, column.name, where, faults)
        if values is not None:
            values = _converted_column(values, column, rules, where, faults, breaches)
        if values is not None:
            found[column.name] = values
            breaches += _column_breaches(values, column, rules, breaches)
            faults += _null_rate_faults(values, column, where)
    breaches += _time_breaches(found, rules)
    breaches += _repeated_rows(found, rules, repeated)
    faults += _freshness_faults(found, rules, where)
    if rules.invalid_rows is InvalidRows.REFUSE or faults:
        faults += [_fault(each, where) for each in breaches]
    if faults:
        columns = len({fault.where for fault in faults})
        raise InvalidInput(
            f"{where}: {columns} column{'s do' if columns > 1 else ' does'} not fit", faults=faults
        )
    table = pa.table(found)
    return _separated(rows, table, breaches, rules, where, numbers) if breaches else CheckedRows(table)


def _single_column(rows: ArrowTable, name: str, where: str, faults: list[Fault]) -> Any:
    """Return the values of the one column of that name; None, and a fault, if there is not one."""
    if rows.column_names.count(name) == 1:
        return rows[name]
    given = shorten(f"columns {', '.join(rows.column_names)}", limit=400)
    others = {other.casefold(): other for other in rows.column_names if other != name}
    close = get_close_matches(name.casefold(), others, n=1)
    fix = f"did you mean {shorten(others[close[0]])}? Rename it to {name}" if close else None
    faults.append(Fault(where=f"{where}.{name}", given=given, allowed="one column of this name", fix=fix))
    return None


def _converted_column(
    values: Any,
    column: Feature,
    rules: RowRules,
    where: str,
    faults: list[Fault],
    breaches: list[_Breach],
) -> Any:
    """Return `values` in the type of their column, null where one cannot be converted; None if the file is refused."""
    if rules.invalid_rows is InvalidRows.REFUSE:
        return cast_column(values, column.name, column.type, where, faults)
    try:
        return converted(values, column.type)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return cast_column(values, column.name, column.type, where, faults)
    except pa.ArrowInvalid:
        bad = inconvertible_rows(values, column.type, limit=_most_invalid(rules, len(values)))
    breaches.append(_Breach(RowRule.TYPE, column.name, bad, values, type_name(column.type)))
    if len(bad) > _most_invalid(rules, len(values)):  # not all were looked for: it is refused
        return None
    return converted(pc.if_else(_mask(bad, len(values)), None, values), column.type)


def _column_breaches(
    values: Any, column: Feature, rules: RowRules, earlier: Sequence[_Breach]
) -> Iterator[_Breach]:
    """Yield the breaches of a column's own rules. `values` are null where `earlier` ones say that they have no type."""
    allowed, kind = column.rules, TYPES[column.type]
    if (column.not_null or column.name in rules.required) and values.null_count:
        nulls = pc.is_null(values)
        for each in earlier:
            if each.column == column.name:
                nulls = pc.and_not(nulls, _mask(each.rows, len(values)))
        yield from _breach(RowRule.NOT_NULL, column.name, nulls, values, "a value in every row")
    as_stored: Callable[[Any], Any] = float if column.type is ColumnType.FLOAT else lambda value: value
    if column.min is not None:
        below = pc.less(values, pa.scalar(as_stored(column.min), kind))
        yield from _breach(RowRule.MIN, column.name, below, values, allowed[RowRule.MIN])
    if column.max is not None:
        above = pc.greater(values, pa.scalar(as_stored(column.max), kind))
        yield from _breach(RowRule.MAX, column.name, above, values, allowed[RowRule.MAX])
    if column.allowed is not None:
        known = pa.array([*map(as_stored, column.allowed), None], kind)
        others = pc.invert(pc.is_in(values, known))
        words = shorten(allowed[RowRule.ALLOWED], limit=SHOWN_WORDS)
        yield from _breach(RowRule.ALLOWED, column.name, others, values, words)


def _time_breaches(found: dict[str, Any], rules: RowRules) -> Iterator[_Breach]:
    if rules.latest is not None and rules.event_time in found:
        times = found[rules.event_time]
        ahead = pc.greater(times, pa.scalar(rules.latest, TYPES[ColumnType.MOMENT]))
        yield from _breach(
            RowRule.MAX_AHEAD, rules.event_time, ahead, times, f"times until {rules.latest.isoformat()}"
        )


def _repeated_rows(found: dict[str, Any], rules: RowRules, repeated: Any) -> Iterator[_Breach]:
    """Yield the rows that have keys and times of an earlier row, also of an invalid one: the first of them counts.

    Rows without a key or time are invalid already. `repeated` are rows whose first is elsewhere.
    """
    if not rules.unique or not all(name in found for name in rules.unique):
        return
    columns = {name: found[name] for name in rules.unique}
    rows = pa.table({**columns, ROW: pa.arange(0, len(columns[rules.unique[0]]))}).drop_null()
    first = rows.group_by([*rules.unique], use_threads=False).aggregate([(ROW, "min")])[f"{ROW}_min"]
    again = rows[ROW].filter(pc.invert(pc.is_in(rows[ROW], first))) if len(first) < len(rows) else None
    parts = [part.cast(pa.int64()) for part in (again, repeated) if part is not None and len(part)]
    if parts:
        chunks = [chunk for part in parts for chunk in getattr(part, "chunks", [part])]
        bad = pc.unique(pa.concat_arrays(chunks))
        ordered = bad.take(pc.sort_indices(bad))
        name, values = ", ".join(rules.unique), columns[rules.unique[0]]
        yield _Breach(RowRule.UNIQUE, name, ordered, values, "rows of different keys and times")


def _breach(rule: RowRule, column: str, mask: Any, values: Any, allowed: str) -> Iterator[_Breach]:
    if pc.any(mask).as_py():
        yield _Breach(rule, column, pc.indices_nonzero(mask).cast(pa.int64()), values, allowed)


def _null_rate_faults(values: Any, column: Feature, where: str) -> Iterator[Fault]:
    """Yield a fault if too many values of a file are null. Those that cannot be converted count: they are missing."""
    limit = column.max_null_rate
    if limit is not None and values.null_count > limit * len(values):
        given = f"{values.null_count} of {len(values)} rows without a value"
        yield Fault(
            where=f"{where}.{column.name}", given=given, allowed=f"at most {limit * 100:g} % (max_null_rate)"
        )


def _freshness_faults(found: dict[str, Any], rules: RowRules, where: str) -> Iterator[Fault]:
    """Yield a fault if the newest event time of a file is too old."""
    if rules.fresh_since is None or rules.event_time not in found:
        return
    newest = pc.max(found[rules.event_time])
    if newest.is_valid and newest.as_py() < rules.fresh_since:
        given = f"newest {newest.as_py().isoformat()}"
        allowed = f"rows since {rules.fresh_since.isoformat()} (freshness)"
        fix = "ingest it as a back-fill, if it is history"
        yield Fault(where=f"{where}.{rules.event_time}", given=given, allowed=allowed, fix=fix)


def _fault(breach: _Breach, where: str) -> Fault:
    first = breach.rows[: SHOWN_ROWS + 1].to_pylist()
    if breach.rule is RowRule.NOT_NULL:
        rows = row_numbers(first[:SHOWN_ROWS], len(breach.rows))
        given = f"{len(breach.rows)} without a value: {rows}"
    else:
        given = shown_rows(breach.values, first)
    return Fault(where=f"{where}.{breach.column}", given=given, allowed=breach.allowed)


def _separated(
    rows: ArrowTable,
    table: ArrowTable,
    breaches: Sequence[_Breach],
    rules: RowRules,
    where: str,
    numbers: Any,
) -> CheckedRows:
    """Return the valid rows of `table`, and the invalid ones of `rows`; InvalidInput if those are too many."""
    positions, lists = _broken_lists(breaches)
    if len(positions) > _most_invalid(rules, rows.num_rows):
        share = f"at most {rules.max_invalid_share * 100:g} % may be (max_invalid_share)"
        raise InvalidInput(
            f"{where}: at least {len(positions)} of {rows.num_rows} rows are invalid; {share}",
            faults=[_fault(each, where) for each in breaches],
        )
    mask = _mask(positions, rows.num_rows)
    own = pc.add(positions, 1) if numbers is None else numbers.filter(mask)
    invalid = rows.select([column.name for column in rules.columns]).filter(mask)
    invalid = invalid.append_column(ROW, own).append_column(BROKEN, lists)
    counts = tuple(
        BrokenRule(rule=each.rule, column=each.column, rows=len(each.rows))
        for each in sorted(breaches, key=lambda each: -len(each.rows))
    )
    return CheckedRows(table.filter(pc.invert(mask)), invalid, counts)


def _broken_lists(breaches: Sequence[_Breach]) -> tuple[Any, Any]:
    """Return the positions of all invalid rows, ascending, and for each the list of the rules that it breaks."""
    positions = pa.concat_arrays([each.rows for each in breaches])
    codes = pa.concat_arrays([pa.repeat(number, len(each.rows)) for number, each in enumerate(breaches)])
    order = pc.sort_indices(
        pa.table({ROW: positions, "code": codes}), [(ROW, "ascending"), ("code", "ascending")]
    )
    runs, codes = pc.run_end_encode(positions.take(order)), codes.take(order)
    structs = pa.StructArray.from_arrays(
        [
            pa.array([str(each.rule) for each in breaches]).take(codes),
            pa.array([each.column for each in breaches]).take(codes),
        ],
        names=["rule", "column"],
    )
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), runs.run_ends])
    return runs.values, pa.ListArray.from_arrays(offsets, structs)


def _most_invalid(rules: RowRules, rows: int) -> int:
    return int(rules.max_invalid_share * rows)


def _mask(positions: Any, length: int) -> Any:
    return pc.is_in(pa.arange(0, length), positions)
