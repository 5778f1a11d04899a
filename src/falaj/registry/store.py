"""SQL of the registry: models, versions, aliases and approvals."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, insert, select, update

from falaj.governance import objects
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.registry import AliasChange, AliasMove, Approval
from falaj.registry.tables import alias_changes, aliases, approvals, models, versions

_ENSURE_ALIAS = (
    "INSERT INTO registry_aliases (model, alias, protected) VALUES (?, ?, FALSE) ON CONFLICT DO NOTHING"
)


def find_or_create_model(
    tx: Transaction, name: str, *, workspace: StoredObject, new: StoredObject
) -> ObjectId:
    """Return the model `name` of a workspace; create it as `new` if there is none."""
    found = objects.by_name(tx, workspace=workspace.id, kind="model", name=name)
    if found is None:
        # Concurrent registrations of a first version are serialised here; references to the workspace do not wait.
        locked = select(objects_table.c.id).where(objects_table.c.id == workspace.id)
        tx.execute(locked.with_for_update(key_share=True))
        found = objects.by_name(tx, workspace=workspace.id, kind="model", name=name)
    if found is None:
        objects.create(tx, new)
        tx.execute(insert(models), {"id": new.id, "versions": 0})
        return new.id
    return found.id


def next_number(tx: Transaction, model: ObjectId) -> int:
    """Return the number of the next version; concurrent callers wait until this transaction ends."""
    counted = update(models).where(models.c.id == model).values(versions=models.c.versions + 1)
    return int(tx.execute(counted.returning(models.c.versions)).scalar_one())


def add_version(
    tx: Transaction, ident: ObjectId, *, model: ObjectId, number: int, manifest: str, key: str, signature: str
) -> None:
    row = {"id": ident, "model": model, "number": number}
    tx.execute(insert(versions), row | {"manifest": manifest, "key": key, "signature": signature})


def version_row(tx: Transaction, ident: ObjectId) -> RowMapping | None:
    return tx.execute(select(versions).where(versions.c.id == ident)).mappings().first()


def version_objects(
    tx: Transaction, model: ObjectId, *, before: int | None, limit: int
) -> list[tuple[int, StoredObject]]:
    """Return the versions of a model with their numbers, newest first."""
    query = (
        select(versions.c.number, objects_table)
        .join(objects_table, objects_table.c.id == versions.c.id)
        .where(versions.c.model == model, objects_table.c.deleted_at.is_(None))
        .order_by(versions.c.number.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(versions.c.number < before)
    return [(row["number"], objects.stored_object(row)) for row in tx.execute(query).mappings()]


def version_count(tx: Transaction, model: ObjectId) -> int:
    return int(tx.execute(select(models.c.versions).where(models.c.id == model)).scalar_one())


def lock_alias(tx: Transaction, model: ObjectId, alias: str) -> bool:
    """Lock an alias until the transaction ends, creating it on first use; return whether it is protected."""
    tx.execute_sql(_ENSURE_ALIAS, (model, alias))
    query = select(aliases.c.protected).where(aliases.c.model == model, aliases.c.alias == alias)
    return bool(tx.execute(query.with_for_update()).scalar_one())


def protect_alias(tx: Transaction, model: ObjectId, alias: str) -> None:
    tx.execute(
        update(aliases).where(aliases.c.model == model, aliases.c.alias == alias).values(protected=True)
    )


def alias_rows(tx: Transaction, model: ObjectId) -> Sequence[RowMapping]:
    return (
        tx.execute(select(aliases).where(aliases.c.model == model).order_by(aliases.c.alias)).mappings().all()
    )


def moves(tx: Transaction, model: ObjectId, alias: str) -> list[tuple[AliasMove, ObjectId]]:
    """Return every move of an alias with the version it moved to, oldest first."""
    query = select(alias_changes.c.move, alias_changes.c.version).where(*_of(model, alias))
    return [(AliasMove(move), version) for move, version in tx.execute(query.order_by(alias_changes.c.seq))]


def version_at(tx: Transaction, model: ObjectId, alias: str, *, at: datetime | None) -> ObjectId | None:
    """Return the version that an alias pointed at at a time; None means now."""
    query = select(alias_changes.c.version).where(*_of(model, alias))
    if at is not None:
        query = query.where(alias_changes.c.at <= at)
    found: ObjectId | None = tx.execute(query.order_by(alias_changes.c.seq.desc()).limit(1)).scalar()
    return found


def add_change(
    tx: Transaction,
    model: ObjectId,
    alias: str,
    *,
    version: ObjectId,
    move: AliasMove,
    by: str,
    at: datetime,
) -> AliasChange:
    """Add a move of an alias that the caller has locked."""
    last = tx.execute(_changes(model, alias).limit(1)).mappings().first()
    row = {
        "model": model,
        "alias": alias,
        "seq": 1 if last is None else last["seq"] + 1,
        "version": version,
        "previous": None if last is None else last["version"],
        "move": move,
        "by": by,
        "at": at,
    }
    tx.execute(insert(alias_changes), row)
    return change_record(tx, row)


def changes(
    tx: Transaction, model: ObjectId, alias: str, *, before: int | None, limit: int
) -> list[AliasChange]:
    """Return the moves of an alias, newest first."""
    query = _changes(model, alias).limit(limit)
    if before is not None:
        query = query.where(alias_changes.c.seq < before)
    return [change_record(tx, dict(row)) for row in tx.execute(query).mappings()]


def change_record(tx: Transaction, row: dict[str, Any]) -> AliasChange:
    return AliasChange(
        seq=row["seq"],
        alias=row["alias"],
        version=_name(tx, row["version"]),
        previous=None if row["previous"] is None else _name(tx, row["previous"]),
        move=AliasMove(row["move"]),
        by=_name(tx, row["by"]),
        at=row["at"],
    )


def add_approval(
    tx: Transaction, ident: ObjectId, *, version: ObjectId, alias: str, by: str, comment: str, at: datetime
) -> Approval:
    row = {"id": ident, "version": version, "alias": alias, "by": by, "comment": comment, "at": at}
    tx.execute(insert(approvals), row)
    return _approval(tx, row | {"withdrawn_at": None})


def approvals_of(tx: Transaction, version: ObjectId, alias: str) -> list[Approval]:
    """Return the valid approvals of a version for an alias, oldest first."""
    query = select(approvals).where(*_holding(version, alias)).order_by(approvals.c.at, approvals.c.id)
    return [_approval(tx, dict(row)) for row in tx.execute(query).mappings()]


def has_approved(tx: Transaction, version: ObjectId, alias: str, *, by: str) -> bool:
    query = select(approvals.c.id).where(*_holding(version, alias), approvals.c.by == by)
    return tx.execute(query).first() is not None


def withdraw_approvals(tx: Transaction, version: ObjectId, alias: str, *, at: datetime) -> None:
    tx.execute(update(approvals).where(*_holding(version, alias)).values(withdrawn_at=at))


def _approval(tx: Transaction, row: dict[str, Any]) -> Approval:
    names = {"version": _name(tx, row["version"]), "by": _name(tx, row["by"])}
    return Approval.model_validate(row | names)


def _changes(model: ObjectId, alias: str) -> Select[Any]:
    return select(alias_changes).where(*_of(model, alias)).order_by(alias_changes.c.seq.desc())


def _of(model: ObjectId, alias: str) -> tuple[Any, ...]:
    return alias_changes.c.model == model, alias_changes.c.alias == alias


def _holding(version: ObjectId, alias: str) -> tuple[Any, ...]:
    return approvals.c.version == version, approvals.c.alias == alias, approvals.c.withdrawn_at.is_(None)


def _name(tx: Transaction, ident: str) -> str:
    found = objects.ever(tx, ident)
    return ident if found is None else found.name
