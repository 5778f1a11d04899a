"""The SQL of queues, budgets and the results of what-ifs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, cast

from sqlalchemy import bindparam, delete, insert, select, update

from falaj.errors import NotFound
from falaj.governance import objects as object_store
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.encryption.values import SealedValues
from falaj.governance.tables import objects
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, ObjectId
from falaj.records.scheduling.accounting import Period
from falaj.records.scheduling.simulation import WhatIfComparison
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling.tables import budgets, comparisons, queues

SLICE = 900
"""Values per IN list: under every database's limit."""


class StoredQueue(NamedTuple):
    """A row of the queues; with no `workspaces`, all may submit into it."""

    id: ObjectId
    queue: Queue
    workspaces: tuple[ObjectId, ...]
    version: int

    @property
    def name(self) -> str:
        return self.queue.name


class BudgetCount(NamedTuple):
    """The usage of ended attempts since a moment; money in one currency only."""

    since: datetime
    currency: str | None
    gpu_hours: float
    money: float


class StoredBudget(NamedTuple):
    """A row of the budgets, with the usage counted so far."""

    workspace: ObjectId
    gpu_hours: float | None
    money: float | None
    period: Period
    since: datetime
    counted: BudgetCount | None = None


_queues = (
    select(objects.c.id, objects.c.name, *(column for column in queues.c if column.name != "id"))
    .select_from(objects.outerjoin(queues, queues.c.id == objects.c.id))
    .where(objects.c.workspace == ROOT, objects.c.kind == "queue", objects.c.deleted_at.is_(None))
    .order_by(objects.c.name)
)
_VERSIONS = (
    "SELECT o.id, q.version FROM governance_objects o LEFT JOIN scheduling_queues q ON q.id = o.id "
    "WHERE o.workspace = 'platform' AND o.kind = 'queue' AND o.deleted_at IS NULL"
)
_budget_of = select(budgets).where(budgets.c.workspace == bindparam("of")).with_for_update()
_budgets = (
    select(budgets)
    .join(objects, objects.c.id == budgets.c.workspace)
    .where(objects.c.deleted_at.is_(None))
    .order_by(objects.c.name)
)


# ---------------------------------------------------------------------------------------------- queues


def lock_queues(tx: Transaction) -> None:
    """Lock queues and budgets against other writers until the transaction ends."""
    tx.execute(select(objects.c.id).where(objects.c.id == ROOT).with_for_update(key_share=True))


def all_queues(tx: Transaction) -> dict[str, StoredQueue]:
    """Return every queue by name; one that was never set has neither quota nor parent."""
    rows = list(tx.execute(_queues).mappings())
    names = {row["id"]: row["name"] for row in rows}
    return {row["name"]: _stored(row, names) for row in rows}


class QueueCache:
    """Reads the queues repeatedly; parses them again only when a version has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int | None], StoredQueue] = {}

    def queues(self, tx: Transaction) -> dict[str, StoredQueue]:
        """Return every queue by name, as `all_queues` does."""
        keys = [(ident, version) for ident, version in tx.execute_sql(_VERSIONS)]
        if set(keys) != self._known.keys():
            fresh = all_queues(tx)
            self._known = {(each.id, each.version or None): each for each in fresh.values()}
        return {each.name: each for each in self._known.values()}


def put_queue(
    tx: Transaction, ident: ObjectId, new: Queue, *, workspaces: Iterable[str], version: int
) -> None:
    """Insert or update the settings of a queue."""
    parent = None
    if new.parent is not None:
        found = object_store.by_name(tx, workspace=ROOT, kind="queue", name=new.parent)
        parent = None if found is None else found.id
    allowed = list(workspaces)
    values = {
        "parent": parent,
        "quota": new.quota.model_dump(mode="json"),
        "at_most": None if new.limit is None else new.limit.model_dump(mode="json"),
        "weight": new.weight,
        "workspaces": allowed or None,
        "version": version,
    }
    if tx.execute(update(queues).where(queues.c.id == ident).values(**values)).rowcount == 0:
        tx.execute(insert(queues), {"id": ident, **values})


def remove_queue(tx: Transaction, ident: ObjectId, *, at: datetime) -> None:
    tx.execute(delete(queues).where(queues.c.id == ident))
    object_store.delete(tx, ident, at=at)


def _stored(row: Any, names: Mapping[str, str]) -> StoredQueue:
    if row["version"] is None:
        return StoredQueue(row["id"], Queue(name=row["name"]), (), 0)
    limit = None if row["at_most"] is None else Quota.model_validate(row["at_most"])
    queue = Queue(
        name=row["name"],
        quota=Quota.model_validate(row["quota"]),
        parent=names.get(row["parent"]),
        limit=limit,
        weight=row["weight"],
    )
    return StoredQueue(row["id"], queue, tuple(row["workspaces"] or ()), row["version"])


# --------------------------------------------------------------------------------------------- budgets


def all_budgets(tx: Transaction) -> list[StoredBudget]:
    """Return the budgets of existing workspaces, ordered by workspace name."""
    return [_budget(row) for row in tx.execute(_budgets).mappings()]


def budget_of(tx: Transaction, workspace: str) -> StoredBudget | None:
    """Return the budget of a workspace, and lock it until the transaction ends."""
    row = tx.execute(_budget_of, {"of": workspace}).mappings().first()
    return None if row is None else _budget(row)


def put_budget(tx: Transaction, new: StoredBudget) -> None:
    drop_budget(tx, new.workspace)
    values = {name: value for name, value in new._asdict().items() if name != "counted"}
    tx.execute(insert(budgets), values | _counted_columns(new.counted))


def count_budget(tx: Transaction, workspace: str, counted: BudgetCount) -> None:
    changed = update(budgets).where(budgets.c.workspace == workspace)
    tx.execute(changed.values(**_counted_columns(counted)))


def drop_budget(tx: Transaction, workspace: str) -> None:
    tx.execute(delete(budgets).where(budgets.c.workspace == workspace))


def _budget(row: Any) -> StoredBudget:
    period, since = cast(Period, row["period"]), row["counted_from"]
    sums = row["counted_currency"], row["counted_gpu_hours"], row["counted_money"]
    counted = None if since is None else BudgetCount(since, *sums)
    return StoredBudget(row["workspace"], row["gpu_hours"], row["money"], period, row["since"], counted)


def _counted_columns(counted: BudgetCount | None) -> dict[str, Any]:
    return {
        "counted_from": None if counted is None else counted.since,
        "counted_currency": None if counted is None else counted.currency,
        "counted_gpu_hours": 0.0 if counted is None else counted.gpu_hours,
        "counted_money": 0.0 if counted is None else counted.money,
    }


# ----------------------------------------------------------------------------------------- comparisons


def seal_comparison(sealed: SealedValues, work: StoredObject, comparison: WhatIfComparison) -> bytes:
    """Encrypt a comparison. Call it outside a transaction: it reads the keys in its own."""
    return sealed.seal(work.workspace, comparison.model_dump_json().encode(), context=work.id.encode())


def put_comparison(tx: Transaction, work: StoredObject, sealed: bytes) -> None:
    """Store a comparison unless the work has one: a repeated replay gives the same result."""
    if _comparison_row(tx, work) is None:
        require_living_key(tx, work.workspace)
        tx.execute(insert(comparisons), {"work": work.id, "sealed": sealed})


def read_comparison(database: Database, sealed: SealedValues, work: StoredObject) -> WhatIfComparison:
    with database.read() as tx:
        row = _comparison_row(tx, work)
    if row is None:
        raise NotFound(
            f"work {work.id} has no comparison: it has not succeeded, or is not a what-if; "
            f"falaj workflows show {work.id}"
        )
    value = sealed.unseal(work.workspace, row, context=work.id.encode())
    return WhatIfComparison.model_validate_json(value)


def _comparison_row(tx: Transaction, work: StoredObject) -> bytes | None:
    found = tx.execute(select(comparisons.c.sealed).where(comparisons.c.work == work.id)).scalar()
    return None if found is None else bytes(found)


# ----------------------------------------------------------------------------------------------- names


def names_of(tx: Transaction, idents: Iterable[str]) -> dict[str, str]:
    """Return the names of objects by id, also of removed ones."""
    wanted = sorted(set(idents))
    found: dict[str, str] = {}
    for start in range(0, len(wanted), SLICE):
        part = wanted[start : start + SLICE]
        rows = tx.execute(select(objects.c.id, objects.c.name).where(objects.c.id.in_(part)))
        found |= {row.id: row.name for row in rows}
    return found
