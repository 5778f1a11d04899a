"""Which rows a new version of a view takes over from the last one: those that fit its definition."""

from __future__ import annotations

from dataclasses import dataclass

from falaj.records.features import ColumnType, Feature, FeatureView, KeepRows, StoredView

HARMLESS = frozenset(
    {
        *("name", "entities", "columns", "ttl", "sql", "aggregations", "only", "classes"),
        *("invalid_rows", "max_invalid_share", "max_ahead", "unique", "freshness"),
    }
)
"""Fields of a view that rows may survive; of these, `columns` and `sql` are looked at, and the keys of entities. Rules
are for rows that come in: those that are stored are not checked again."""

HINT = "ingest them again, or read the earlier version"


@dataclass(frozen=True)
class KeptRows:
    """Whether the rows of the last version fit the new one, and what becomes of them, in words."""

    fit: bool
    notes: tuple[str, ...]


def rows_that_fit(
    before: StoredView, given: FeatureView, keys: tuple[Feature, ...], *, keep: KeepRows
) -> KeptRows:
    """Compare the last version of a view, which has rows, with a new definition."""
    reasons = _reasons(before, given, keys, keep=keep)
    count = f"{before.rows} row{'' if before.rows == 1 else 's'} of version {before.version}"
    if reasons:
        return KeptRows(False, (f"{count} not kept: {'; '.join(reasons)}: {HINT}",))
    old, new = ({column.name: column.type for column in each.columns} for each in (before.definition, given))
    notes = [f"{count} kept"]
    notes += [f"{name} is new, and null in them" for name in new if name not in old]
    notes += [f"{name} is removed" for name in old if name not in new]
    notes += [f"{name} becomes {new[name]}" for name in new if old.get(name, new[name]) != new[name]]
    if before.definition.sql != given.sql:
        notes.append("they were made by the earlier sql")
    return KeptRows(True, tuple(notes))


def _reasons(
    before: StoredView, given: FeatureView, keys: tuple[Feature, ...], *, keep: KeepRows
) -> list[str]:
    """Say why the rows of `before` cannot be kept; nothing if they can."""
    if keep is KeepRows.NONE:
        return ["as asked"]
    old = before.definition
    names = (name for name in type(given).model_fields if name not in HARMLESS)
    reasons = [f"{name} changed" for name in names if getattr(old, name) != getattr(given, name)]
    if before.keys != keys:
        reasons.append("the keys changed")
    if old.sql != given.sql and keep is not KeepRows.ALL:
        reasons.append("sql changed (keep_rows all keeps what the earlier one made)")
    types = {column.name: column.type for column in old.columns}
    for column in given.columns:
        was = types.get(column.name, column.type)
        if was is not column.type and (was, column.type) != (ColumnType.INTEGER, ColumnType.FLOAT):
            reasons.append(f"{column.name} was {was}, and is {column.type} now")
    return reasons
