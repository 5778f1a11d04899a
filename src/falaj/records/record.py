"""The base of all records: frozen, strict about unknown fields, times in UTC; and their tables in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

MAX_ROWS, MAX_COLUMNS, MAX_TEXT = 20, 8, 80
"""Limits of a table in a notebook."""


class Record(BaseModel):
    """A frozen fact. Unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Leave out what is as by default, so that a record is short in a prompt."""
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            field = fields.get(name or "")
            if field is None or field.is_required() or value != field.get_default(call_default_factory=False):
                yield name, value

    def _repr_html_(self) -> str:
        """Return the fields as an HTML table, for notebooks."""
        shown = [(name, value) for name, value in self.__repr_args__() if value not in (None, (), {})]
        return html_table(type(self).__name__, ("field", "value"), shown)


R = TypeVar("R", bound=Record)


def unvalidated(kind: type[R], values: dict[str, Any]) -> R:
    """Return a record with these values for all of its fields, in their order, as `model_construct` does.

    That takes ten times as long, and this is for every row that is read: what was stored has been validated.
    """
    found = _new(kind)
    _set(found, "__dict__", values)
    _set(found, "__pydantic_fields_set__", _FIELD_NAMES[kind])
    _set(found, "__pydantic_extra__", None)
    _set(found, "__pydantic_private__", None)
    return found


class _FieldNames(dict[type[Record], set[str]]):
    def __missing__(self, kind: type[Record]) -> set[str]:
        return self.setdefault(kind, set(kind.model_fields))


_FIELD_NAMES = _FieldNames()
_new, _set = object.__new__, object.__setattr__


class Digested:
    """A value of an operation's input that has a quick digest of its own, for the audit log."""

    __slots__ = ()

    def digest(self) -> str:
        raise NotImplementedError


def utc_now() -> datetime:
    return datetime.now(UTC)


def html_table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML; `names` are the heads of its columns. Every text is escaped: it may come from users."""
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<table><caption>{_text(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def records_table(title: str, records: Sequence[BaseModel]) -> str:
    """Return the first records as a table of their first plain fields."""
    if not records:
        return html_table(title, (), ())
    shown = [name for name, field in type(records[0]).model_fields.items() if field.repr]
    names = [name for name in shown if _is_plain(records, name)][:MAX_COLUMNS]
    rows: list[Sequence[object]] = [
        [getattr(record, name) for name in names] for record in records[:MAX_ROWS]
    ]
    if len(records) > MAX_ROWS:
        rows.append([f"… {len(records) - MAX_ROWS} more"])
    return html_table(title, names, rows)


def _is_plain(records: Sequence[BaseModel], name: str) -> bool:
    values: list[Any] = [getattr(record, name, None) for record in records[:MAX_ROWS]]
    return any(value is not None for value in values) and not any(
        isinstance(value, BaseModel | dict | list | tuple | set | frozenset) for value in values
    )


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return escape(text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…")
