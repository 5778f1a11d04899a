"""SQL of the registry: models, versions, aliases and approvals."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, RowMapping, Select, func, insert, select, update

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Appointment
from falaj.records.governance.objects import StoredObject
from falaj.records.models.gates import PromotionEvidence
from falaj.records.names import ObjectId
from falaj.records.registry import AliasChange, AliasMove, Approval, ModelVersion, StandingApprovals
from falaj.registry.tables import alias_changes, aliases, approvals, models, versions

_ENSURE_ALIAS = (
    "INSERT INTO registry_aliases (model, alias, protected, independent) VALUES (?, ?, ?, ?) "
    "ON CONFLICT DO NOTHING RETURNING model"
)


def _query_of_aliases() -> Select[Any]:
    moves_of = alias_changes.alias()
    newest = (
        select(func.max(moves_of.c.seq))
        .where(moves_of.c.model == aliases.c.model, moves_of.c.alias == aliases.c.alias)
        .where(moves_of.c.move != AliasMove.PROTECT)
        .scalar_subquery()
    )
    same = (alias_changes.c.model == aliases.c.model) & (alias_changes.c.alias == aliases.c.alias)
    name = func.coalesce(objects_table.c.name, alias_changes.c.version)
    return (
        select(aliases, alias_changes.c.at, alias_changes.c.move, name.label("version"))
        .select_from(aliases)
        .outerjoin(alias_changes, same & (alias_changes.c.seq == newest))
        .outerjoin(objects_table, objects_table.c.id == alias_changes.c.version)
        .order_by(aliases.c.model, aliases.c.alias)
    )


_models = objects.RowsByIds(select(models), models.c.id)
_aliases = objects.RowsByIds(_query_of_aliases(), aliases.c.model)


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


def next_number(tx: Transaction, model: ObjectId, *, name: str) -> int:
    """Return the number of the next version of the model of this name; concurrent callers wait until this transaction
    ends. Conflict if it was renamed or deleted meanwhile."""
    counted = update(models).where(models.c.id == model).values(versions=models.c.versions + 1)
    number = tx.execute(counted.returning(models.c.versions)).scalar_one_or_none()
    found = objects.by_id(tx, model)
    if number is None or found is None or found.name != name:
        raise Conflict(f"the model {name} was renamed or deleted meanwhile; try again")
    return int(number)


def has_versions(tx: Transaction, model: ObjectId) -> bool:
    """Tell whether a model has versions; it gets none until this transaction ends."""
    query = select(models.c.versions).where(models.c.id == model).with_for_update()
    return bool(tx.execute(query).scalar_one())


def add_version(
    tx: Transaction, ident: ObjectId, *, model: ObjectId, number: int, manifest: str, key: str, signature: str
) -> None:
    row = {"id": ident, "model": model, "number": number}
    tx.execute(insert(versions), row | {"manifest": manifest, "key": key, "signature": signature})


def version_row(tx: Transaction, ident: ObjectId) -> RowMapping | None:
    return tx.execute(select(versions).where(versions.c.id == ident)).mappings().first()


def lock_version(tx: Transaction, ident: ObjectId) -> None:
    """Lock a version until the transaction ends."""
    tx.execute(select(versions.c.id).where(versions.c.id == ident).with_for_update())


def version_objects(
    tx: Transaction,
    model: ObjectId,
    *,
    before: int | None,
    limit: int,
    conditions: Sequence[ColumnElement[bool]] = (),
) -> list[tuple[StoredObject, RowMapping]]:
    """Return the versions of a model with their rows, newest first."""
    facts = (column for column in versions.c if column.name != "id")
    query = (
        select(objects_table, *facts)
        .join(objects_table, objects_table.c.id == versions.c.id)
        .where(versions.c.model == model, objects_table.c.deleted_at.is_(None), *conditions)
        .order_by(versions.c.number.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(versions.c.number < before)
    return [(objects.stored_object(row), row) for row in tx.execute(query).mappings()]


def version_counts(tx: Transaction, idents: Sequence[ObjectId]) -> dict[ObjectId, int]:
    """Return how many versions each model has had."""
    return {row["id"]: row["versions"] for row in _models.fetch(tx, idents)}


class Protection(NamedTuple):
    """Whether an alias needs approval, and by someone whom the authors did not appoint."""

    protected: bool
    independent: bool


def lock_alias(tx: Transaction, model: ObjectId, alias: str) -> Protection:
    """Lock an alias until the transaction ends, creating it on first use; return how it is protected."""
    tx.execute_sql(_ENSURE_ALIAS, (model, alias, False, False))
    query = select(aliases.c.protected, aliases.c.independent)
    query = query.where(aliases.c.model == model, aliases.c.alias == alias)
    row = tx.execute(query.with_for_update()).one()
    return Protection(bool(row.protected), bool(row.independent))


def protect_alias(tx: Transaction, model: ObjectId, alias: str, *, independent: bool) -> None:
    """Protect an alias; what it demands already, it goes on to demand."""
    values = {"protected": True} | ({"independent": True} if independent else {})
    tx.execute(update(aliases).where(aliases.c.model == model, aliases.c.alias == alias).values(**values))


def protected_aliases(tx: Transaction, version: ObjectId) -> list[tuple[str, bool]]:
    """Return the protected aliases that have pointed at `version`, and whether they demand independence."""
    query = (
        select(aliases.c.alias, aliases.c.independent)
        .join(
            alias_changes,
            (alias_changes.c.model == aliases.c.model) & (alias_changes.c.alias == aliases.c.alias),
        )
        .where(alias_changes.c.version == version, aliases.c.protected)
        .distinct()
        .order_by(aliases.c.alias)
    )
    return [(alias, bool(independent)) for alias, independent in tx.execute(query)]


def alias_rows(tx: Transaction, idents: Sequence[ObjectId]) -> list[dict[str, Any]]:
    """Return the aliases of models, each with the version that it points at and since when."""
    return _aliases.fetch(tx, idents)


def moves(tx: Transaction, model: ObjectId, alias: str) -> list[tuple[AliasMove, ObjectId]]:
    """Return every move of an alias with the version it moved to, oldest first."""
    query = select(alias_changes.c.move, alias_changes.c.version).where(*_of(model, alias))
    return [(AliasMove(move), version) for move, version in tx.execute(query.order_by(alias_changes.c.seq))]


def version_at(tx: Transaction, model: ObjectId, alias: str, *, at: datetime | None) -> ObjectId | None:
    """Return the version that an alias pointed at at a time; None means now."""
    query = select(alias_changes.c.version, alias_changes.c.move).where(*_of(model, alias))
    if at is not None:
        query = query.where(alias_changes.c.at <= at)
    found = tx.execute(query.order_by(alias_changes.c.seq.desc()).limit(1)).first()
    return None if found is None or found.move == AliasMove.REMOVE else ObjectId(found.version)


def add_change(
    tx: Transaction,
    model: ObjectId,
    alias: str,
    *,
    version: ObjectId,
    move: AliasMove,
    by: str,
    at: datetime,
    evidence: PromotionEvidence | None = None,
) -> AliasChange:
    """Add a move of an alias that the caller has locked."""
    last = tx.execute(_changes(model, alias).limit(1)).mappings().first()
    row = {
        "model": model,
        "alias": alias,
        "seq": 1 if last is None else last["seq"] + 1,
        "version": version,
        "previous": None if last is None or last["move"] == AliasMove.REMOVE else last["version"],
        "move": move,
        "by": by,
        "at": at,
        "evidence": _dumped(evidence),
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
        version=objects.name_of(tx, row["version"]),
        previous=None if row["previous"] is None else objects.name_of(tx, row["previous"]),
        move=AliasMove(row["move"]),
        by=objects.name_of(tx, row["by"]),
        at=row["at"],
        evidence=row["evidence"],
    )


def change_at(tx: Transaction, model: ObjectId, alias: str, *, at: datetime) -> AliasChange | None:
    """Return the newest move of an alias by a time."""
    query = _changes(model, alias).where(alias_changes.c.at <= at).limit(1)
    row = tx.execute(query).mappings().first()
    return None if row is None else change_record(tx, dict(row))


def _dumped(evidence: PromotionEvidence | None) -> dict[str, Any] | None:
    return None if evidence is None else evidence.model_dump(mode="json")


def add_approval(
    tx: Transaction,
    ident: ObjectId,
    *,
    version: ObjectId,
    alias: str,
    by: str,
    comment: str,
    at: datetime,
    appointment: Appointment | None,
    independent: bool,
    evidence: PromotionEvidence,
) -> Approval:
    row = {"id": ident, "version": version, "alias": alias, "by": by, "comment": comment, "at": at}
    how = None if appointment is None else appointment.model_dump(mode="json")
    row |= {"appointment": how, "independent": independent, "evidence": _dumped(evidence)}
    tx.execute(insert(approvals), row)
    return _approval(tx, row | {"withdrawn_at": None})


def approvals_of(tx: Transaction, version: ObjectId, alias: str) -> list[Approval]:
    """Return the valid approvals of a version for an alias, oldest first."""
    query = select(approvals).where(*_holding(version, alias)).order_by(approvals.c.at, approvals.c.id)
    return [_approval(tx, dict(row)) for row in tx.execute(query).mappings()]


def standing_approvals(tx: Transaction, version: ModelVersion) -> StandingApprovals:
    """Return for which aliases `version` is approved. What a protected alias points at counts as approved for it."""
    columns = approvals.c.alias, approvals.c.independent, approvals.c.withdrawn_at
    rows = tx.execute(select(*columns).where(approvals.c.version == version.id)).all()
    holding = {(alias, bool(independent)) for alias, independent, withdrawn in rows if withdrawn is None}
    for alias, independent in protected_aliases(tx, version.id):
        if version_at(tx, version.model, alias, at=None) == version.id:
            holding.add((alias, independent))
    approved = frozenset(alias for alias, _ in holding)
    return StandingApprovals(
        approved=approved,
        independent=frozenset(alias for alias, independent in holding if independent),
        withdrawn=frozenset(row.alias for row in rows) - approved,
    )


def lock_approved_aliases(tx: Transaction, version: ModelVersion) -> None:
    """Lock the aliases that `version` was approved for, so that no approval of it is withdrawn meanwhile."""
    named = select(approvals.c.alias).where(approvals.c.version == version.id).distinct()
    for alias in sorted(tx.execute(named).scalars()):
        lock_alias(tx, version.model, alias)


def withdraw_approvals(
    tx: Transaction, version: ObjectId, alias: str, *, at: datetime, by: str | None = None
) -> None:
    """Withdraw the valid approvals of a version for an alias: all, or those of one approver."""
    theirs = () if by is None else (approvals.c.by == by,)
    tx.execute(update(approvals).where(*_holding(version, alias), *theirs).values(withdrawn_at=at))


def _approval(tx: Transaction, row: dict[str, Any]) -> Approval:
    names = {"version": objects.name_of(tx, row["version"]), "by": objects.name_of(tx, row["by"])}
    return Approval.model_validate(row | names | {"independent": bool(row["independent"])})


def _changes(model: ObjectId, alias: str) -> Select[Any]:
    return select(alias_changes).where(*_of(model, alias)).order_by(alias_changes.c.seq.desc())


def _of(model: ObjectId, alias: str) -> tuple[Any, ...]:
    return alias_changes.c.model == model, alias_changes.c.alias == alias


def _holding(version: ObjectId, alias: str) -> tuple[Any, ...]:
    return approvals.c.version == version, approvals.c.alias == alias, approvals.c.withdrawn_at.is_(None)
