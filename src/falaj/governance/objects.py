"""The store of objects: the row that every stored object has, and the resolution of references."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, bindparam, func, or_, select, type_coerce, update
from sqlalchemy.exc import IntegrityError

from falaj.errors import AlreadyExists, InvalidInput, NotFound
from falaj.governance.tables import objects
from falaj.ports.metadata import JsonText, Prepared, Transaction, encode_json, from_micros
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ROOT, ObjectId, PrincipalId
from falaj.records.record import unvalidated

_ID = re.compile(r"^[a-z]+_[0-9a-z]{26}$")
_PART = re.compile(r"^([a-z]+_[0-9a-z]{26})-[0-9][0-9.]*$")
"""A part of an object, such as one prediction of a batch: a reference to it is one to the object."""

MAX_STAND_IN = 200
"""Characters of a reference that are judged if it names nothing."""

SLICE = 900
"""Values per IN list, below every database's limit."""

LISTED = [
    type_coerce(column, Text).label(column.name) if isinstance(column.type, JsonText) else column
    for column in objects.c
    if column.name in StoredObject.model_fields
]
"""The columns of objects for `stored_object`, with labels as text: few objects of a list have one to parse."""

_NO_LABEL = encode_json(UNRESTRICTED.model_dump(mode="json"))
_COLUMNS = "id, workspace, kind, name, owner, zone, label, own_label, created_at"
_BY_ID = f"SELECT {_COLUMNS} FROM governance_objects WHERE id = ? AND deleted_at IS NULL"  # noqa: S608 - constants
_EVER = f"SELECT {_COLUMNS} FROM governance_objects WHERE id = ?"  # noqa: S608 - constants
_BY_NAME = (
    f"SELECT {_COLUMNS} FROM governance_objects "  # noqa: S608 - constants
    "WHERE workspace = ? AND kind = ? AND name = ? AND deleted_at IS NULL"
)

PLATFORM_KINDS = frozenset({"workspace", "user", "service", "group", "token", "queue"})
"""Kinds whose names belong to the platform, not to a workspace."""

KIND_GROUPS = {"user": ("user", "service"), "subject": ("user", "service", "group")}
"""The kinds that a reference to a user, or to a subject of a grant, may name."""


FindByAlias = Callable[[Transaction, str, str], StoredObject | None]
"""Returns the object that a name stands for in a workspace (by id), if it is an alias."""
ALIASES: dict[str, FindByAlias] = {}
"""By kind, how objects are found by names that are not their own; the service that has such names registers it."""


def by_id(tx: Transaction, ident: str) -> StoredObject | None:
    rows = tx.execute_sql(_BY_ID, (ident,))
    return _from_columns(rows[0]) if rows else None


def is_id(text: str) -> bool:
    return _ID.match(text) is not None


def ever(tx: Transaction, ident: str) -> StoredObject | None:
    """Return the object `ident`, even if it was deleted since."""
    rows = tx.execute_sql(_EVER, (ident,))
    return _from_columns(rows[0]) if rows else None


def name_of(tx: Transaction, ident: str) -> str:
    """Return the name of an object, even if it was deleted since; its id if there never was one."""
    found = ever(tx, ident)
    return ident if found is None else found.name


def by_name(tx: Transaction, *, workspace: str, kind: str, name: str) -> StoredObject | None:
    rows = tx.execute_sql(_BY_NAME, (workspace, kind, name))
    return _from_columns(rows[0]) if rows else None


def by_alias(tx: Transaction, *, workspace: str, kind: str, name: str) -> StoredObject | None:
    """Return the object that `name` stands for, where the kind has names that move, such as churn@champion."""
    return ALIASES[kind](tx, workspace, name) if kind in ALIASES else None


def resolve(tx: Transaction, reference: str, *, kind: str | None, workspace: str) -> StoredObject:
    """Return the object that `reference` names, seen from `workspace` (a name). Raise NotFound if there is none."""
    found = _lookup(tx, reference, kind, workspace)
    if found is None or not _is_kind(found, kind):
        raise unknown(reference, kind)
    return found


def unknown(reference: str, kind: str | None) -> NotFound:
    """Return the error for an object that does not exist, or that the caller may not see."""
    kind = kind or "object"
    return NotFound(
        f"there is no {kind} {reference!r}, or you may not see it",
        details={"kind": kind, "reference": reference},
    )


def stand_in(tx: Transaction, reference: str, *, kind: str | None, workspace: str) -> StoredObject:
    """Return an object for a reference that names none, to be judged like one that the caller may not see.

    A refusal must not take less time because there is nothing to refuse.
    """
    place, _, rest = reference[:MAX_STAND_IN].rpartition("/")
    prefix, _, name = rest.rpartition(":")
    kind = kind or prefix or "object"
    home = ROOT if kind in PLATFORM_KINDS else _workspace_id(tx, place or workspace) or ROOT
    return StoredObject.model_construct(
        id=ObjectId(f"{kind}:{reference[:MAX_STAND_IN]}"),
        workspace=ObjectId(home),
        kind=kind,
        name=name,
        owner=PrincipalId(ROOT),
        zone=None,
        label=UNRESTRICTED,
        own_label=UNRESTRICTED,
        created_at=datetime.min.replace(tzinfo=UTC),
    )


def create(tx: Transaction, new: StoredObject) -> None:
    values = new.model_dump(mode="json") | {"created_at": new.created_at}
    try:
        tx.insert(objects, values)
    except IntegrityError:
        raise AlreadyExists(f"there is already a {new.kind} named {new.name!r}") from None


def rename(tx: Transaction, ident: ObjectId, *, name: str) -> None:
    try:
        tx.execute(update(objects).where(objects.c.id == ident).values(name=name))
    except IntegrityError:
        raise AlreadyExists(f"the name {name!r} is taken") from None


def delete(tx: Transaction, ident: ObjectId, *, at: datetime) -> None:
    """Mark an object as deleted: its name becomes free; the row stays for audit and lineage."""
    tx.execute(update(objects).where(objects.c.id == ident).values(deleted_at=at))


def relabel(tx: Transaction, ident: ObjectId, *, label: Label, own: Label | None = None) -> None:
    values: dict[str, Any] = {"label": label.model_dump(mode="json")}
    if own is not None:
        values["own_label"] = own.model_dump(mode="json")
    tx.execute(update(objects).where(objects.c.id == ident).values(**values))


def listed(
    tx: Transaction,
    *,
    kinds: Sequence[str],
    workspace: str | None,
    after: str,
    limit: int,
    conditions: Sequence[ColumnElement[bool]] = (),
) -> list[StoredObject]:
    """Return objects by id, after `after`, that meet every one of `conditions`."""
    query = select(*LISTED).where(
        objects.c.kind.in_(kinds), objects.c.id > after, objects.c.deleted_at.is_(None), *conditions
    )
    if workspace is not None:
        query = query.where(objects.c.workspace == workspace)
    rows = tx.execute(query.order_by(objects.c.id).limit(limit)).mappings()
    return [stored_object(row) for row in rows]


def rows_by_ids(tx: Transaction, sql: str, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the rows of plain SQL that ends with the column of ids, as the database stores them: for large pages."""
    found: list[tuple[Any, ...]] = []
    for start in range(0, len(idents), SLICE):
        some = idents[start : start + SLICE]
        found += tx.execute_sql(f"{sql} IN ({', '.join('?' * len(some))})", some)
    return found


def matching(
    tx: Transaction, text: str, *, workspace: str, before: str | None, limit: int
) -> list[StoredObject]:
    """Return the objects of a workspace whose name has `text`, or whose id begins with it, newest first."""
    named = func.lower(objects.c.name).contains(text.lower(), autoescape=True)
    query = select(*LISTED).where(
        objects.c.workspace == workspace,
        objects.c.deleted_at.is_(None),
        or_(named, objects.c.id.startswith(text.lower(), autoescape=True)),
    )
    order = func.substr(
        objects.c.id, func.length(objects.c.id) - 25
    )  # ids end with the time at which they were made
    if before is not None:
        query = query.where(order < before)
    rows = tx.execute(query.order_by(order.desc()).limit(limit)).mappings()
    return [stored_object(row) for row in rows]


class RowsByIds:
    """A query of rows by the ids in one of its columns: for a page of objects, or for one."""

    def __init__(self, query: Select[Any], column: ColumnElement[Any]) -> None:
        self._sizes = [(size, _by_ids(query, column, size)) for size in (1, 32, 128, SLICE)]

    def fetch(self, tx: Transaction, idents: Sequence[str], **parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of `idents`; `parameters` are further ones of the query."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(idents), SLICE):
            some = idents[start : start + SLICE]
            size, query = next(each for each in self._sizes if each[0] >= len(some))
            padded = [*some, *([some[-1]] * (size - len(some)))]
            given = {f"id{number}": ident for number, ident in enumerate(padded)}
            found += tx.fetch(query, given | parameters)
        return found


def _by_ids(query: Select[Any], column: ColumnElement[Any], size: int) -> Prepared:
    return Prepared(query.where(column.in_([bindparam(f"id{number}", type_=Text) for number in range(size)])))


def stored_object(row: Any) -> StoredObject:
    """Return a row as a record, without validation: it was validated when it was written."""
    return unvalidated(
        StoredObject,
        {
            "id": row["id"],
            "workspace": row["workspace"],
            "kind": row["kind"],
            "name": row["name"],
            "owner": row["owner"],
            "zone": row["zone"],
            "label": _label(row["label"]),
            "own_label": _label(row["own_label"]),
            "created_at": row["created_at"],
        },
    )


def _from_columns(row: tuple[Any, ...]) -> StoredObject:
    """The columns of a quick query, as the database stores them."""
    ident, workspace, kind, name, owner, zone, label, own_label, created_at = row
    return unvalidated(
        StoredObject,
        {
            "id": ident,
            "workspace": workspace,
            "kind": kind,
            "name": name,
            "owner": owner,
            "zone": zone,
            "label": _stored_label(label),
            "own_label": _stored_label(own_label),
            "created_at": from_micros(created_at),
        },
    )


def _stored_label(text: str | None) -> Label:
    return UNRESTRICTED if text is None or text == _NO_LABEL else _label(json.loads(text))


def _label(value: dict[str, Any] | str | None) -> Label:
    if isinstance(value, str):
        return _stored_label(value)
    if not value or (value["only"] is None and not value["classes"]):
        return UNRESTRICTED
    return Label.model_validate(value)


def _lookup(tx: Transaction, reference: str, kind: str | None, workspace: str) -> StoredObject | None:
    if reference == ROOT or is_id(reference):
        return by_id(tx, reference)
    if (part := _PART.match(reference)) and (whole := by_id(tx, part[1])):
        return whole
    place, _, rest = reference.rpartition("/")
    prefix, _, name = rest.rpartition(":")
    if prefix and kind and prefix not in KIND_GROUPS.get(kind, (kind,)):
        return None
    kind = prefix or kind
    if kind is None:
        raise InvalidInput.at(
            "reference", given=reference, allowed="an id, or kind:name", fix=f"blob:{reference}"
        )
    for candidate in KIND_GROUPS.get(kind, (kind,)):
        home = ROOT if candidate in PLATFORM_KINDS else _workspace_id(tx, place or workspace)
        found = home and (
            by_name(tx, workspace=home, kind=candidate, name=name)
            or by_alias(tx, workspace=home, kind=candidate, name=name)
        )
        if found:
            return found
    return None


def _workspace_id(tx: Transaction, name: str) -> str | None:
    if name == ROOT:
        return ROOT
    found = by_name(tx, workspace=ROOT, kind="workspace", name=name)
    return None if found is None else found.id


def _is_kind(found: StoredObject, kind: str | None) -> bool:
    return kind is None or found.kind in KIND_GROUPS.get(kind, (kind,))
