"""SQL of the feature store: entities, view versions, quarantined batches and training sets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, func, insert, or_, select, update

from falaj.errors import Conflict, NotFound
from falaj.features.tables import entities, ingestions, quarantined_batches, training_sets, views
from falaj.governance.objects import by_id
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.ports.tables import TableKey
from falaj.records.features import (
    Entity,
    Feature,
    FeatureView,
    PinnedView,
    RequestFeature,
    StoredView,
    TrainingSet,
)
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId


def load_entity(tx: Transaction, found: StoredObject) -> Entity:
    row = tx.execute(select(entities.c.definition).where(entities.c.id == found.id)).scalar_one()
    return Entity.model_validate(row)


def add_entity(call: Call, new: StoredObject, definition: Entity) -> None:
    call.tx.execute(insert(entities), {"id": new.id, "definition": definition.model_dump(mode="json")})


def find_view(tx: Transaction, found: StoredObject, *, version: int | None = None) -> StoredView | None:
    """Return a version of a view, by default the newest; None if there is none."""
    query = select(views).where(views.c.id == found.id).order_by(views.c.version.desc())
    if version is not None:
        query = query.where(views.c.version == version)
    row = tx.execute(query.limit(1)).mappings().first()
    return None if row is None else _stored_view(found, row)


def load_view(tx: Transaction, found: StoredObject, *, version: int | None = None) -> StoredView:
    """Return a version of a view, by default the newest. Raise NotFound if there is none."""
    stored = find_view(tx, found, version=version)
    if stored is None:
        raise NotFound(f"view {found.name} has no version {version}")
    return stored


def find_online_view(tx: Transaction, found: StoredObject) -> StoredView | None:
    """Return the newest version of a view that is online, if any."""
    query = select(views).where(views.c.id == found.id, views.c.online_version.is_not(None))
    row = tx.execute(query.order_by(views.c.version.desc()).limit(1)).mappings().first()
    return None if row is None else _stored_view(found, row)


def online_views(tx: Transaction) -> list[StoredView]:
    """Return the version of each view that is read online."""
    online = select(views.c.id).where(views.c.online_version.is_not(None)).distinct()
    found = (by_id(tx, ident) for ident in tx.execute(online).scalars().all())
    read = (find_online_view(tx, each) for each in found if each is not None)
    return [each for each in read if each is not None]


def add_view(
    call: Call, ident: str, version: int, definition: FeatureView, keys: tuple[Feature, ...]
) -> None:
    row = {
        "id": ident,
        "version": version,
        "definition": definition.model_dump(mode="json"),
        "keys": [key.model_dump(mode="json") for key in keys],
        "rows": 0,
        "created_at": call.now,
    }
    call.tx.execute(insert(views), row)


def publish_rows(call: Call, before: StoredView, *, table_version: int, rows: int) -> None:
    """Pin the rows of a view. Raise Conflict if another ingestion was published first; the caller retries."""
    same = views.c.table_version.is_not_distinct_from(before.table_version)
    changed = call.tx.execute(
        update(views)
        .where(views.c.id == before.id, views.c.version == before.version, same)
        .values(table_version=table_version, rows=rows)
    )
    if changed.rowcount != 1:
        raise Conflict(f"view {before.definition.name} was changed by another ingestion; try again")


def ingested_at(tx: Transaction, view: StoredView, content: str) -> datetime | None:
    """Return when the upload with the SHA-256 `content` was added to a version of a view first; none if it was not."""
    query = select(ingestions.c.at).where(
        ingestions.c.id == view.id, ingestions.c.version == view.version, ingestions.c.sha256 == content
    )
    at: datetime | None = tx.execute(query).scalar()
    return at


def add_ingestion(call: Call, view: StoredView, content: str) -> None:
    """Record that an upload was added to a version of a view, unless it was before."""
    if ingested_at(call.tx, view, content) is None:
        row = {"id": view.id, "version": view.version, "sha256": content, "at": call.now}
        call.tx.execute(insert(ingestions), row)


def copy_ingestions(call: Call, before: StoredView, after: StoredView) -> None:
    """Record that the uploads of a version were added to a later one, too."""
    query = select(ingestions).where(ingestions.c.id == before.id, ingestions.c.version == before.version)
    rows = [{**row, "version": after.version} for row in call.tx.execute(query).mappings()]
    if rows:
        call.tx.execute(insert(ingestions), rows)


def next_quarantined(tx: Transaction, view: StoredView) -> int:
    """Return the number of the next batch of quarantined rows of a view."""
    last = select(func.max(quarantined_batches.c.number)).where(quarantined_batches.c.view == view.id)
    return int(tx.execute(last).scalar() or 0) + 1


def add_quarantined(call: Call, new: StoredObject, facts: dict[str, Any]) -> None:
    row = {"id": new.id, "by": call.caller.name, "at": call.now, "ingested": 0}
    call.tx.execute(insert(quarantined_batches), row | facts)


def load_quarantined(tx: Transaction, batch: StoredObject) -> RowMapping:
    query = select(quarantined_batches).where(quarantined_batches.c.id == batch.id)
    return tx.execute(query).mappings().one()


def list_quarantined(tx: Transaction, view: ObjectId, *, before: int | None, limit: int) -> list[RowMapping]:
    """Return the batches of a view before the number `before`, newest first."""
    query = select(quarantined_batches).where(quarantined_batches.c.view == view)
    if before is not None:
        query = query.where(quarantined_batches.c.number < before)
    return [*tx.execute(query.order_by(quarantined_batches.c.number.desc()).limit(limit)).mappings()]


def change_quarantined(call: Call, before: RowMapping, changes: dict[str, Any]) -> None:
    """Change a batch. Raise Conflict if it does not have the rows of `before` any more."""
    table = quarantined_batches
    same = update(table).where(table.c.id == before["id"], table.c.rows == before["rows"])
    if call.tx.execute(same.values(**changes)).rowcount != 1:
        raise Conflict("the quarantined batch was changed by someone else; look at it again")


def publish_online(call: Call, found: StoredView) -> None:
    """Record which rows of a view are online; never older ones than before."""
    call.tx.execute(
        update(views)
        .where(views.c.id == found.id, views.c.version == found.version)
        .where(or_(views.c.online_version.is_(None), views.c.online_version <= found.table_version))
        .values(online_version=found.table_version)
    )


def add_training_set(call: Call, new: StoredObject, facts: dict[str, Any]) -> TrainingSet:
    call.tx.execute(insert(training_sets), {"id": new.id, **facts})
    return load_training_set(call.tx, new)


def load_training_set(tx: Transaction, found: StoredObject) -> TrainingSet:
    row = dict(tx.execute(select(training_sets).where(training_sets.c.id == found.id)).mappings().one())
    return TrainingSet(
        workspace=found.workspace,
        name=found.name,
        zone=found.zone or "",
        label=found.label,
        views=tuple(PinnedView.model_validate(each) for each in row.pop("views")),
        columns=tuple(row.pop("columns")),
        request_features=tuple(
            RequestFeature.model_validate(each) for each in row.pop("request_features") or ()
        ),
        created_at=found.created_at,
        **row,
    )


def view_table(found: StoredView) -> TableKey:
    return version_table(found.workspace, found.id, found.version)


def version_table(workspace: str, view: str, version: int) -> TableKey:
    return TableKey(f"{workspace}/{view}/{version}")


def training_table(workspace: str, ident: str) -> TableKey:
    return TableKey(f"{workspace}/{ident}")


def write_queue(found: StoredView) -> TableKey:
    """Return the queue of those who change the rows of a view, in whichever version."""
    return TableKey(f"{found.workspace}/{found.id}")


def online_queue(found: StoredView) -> TableKey:
    """Return the queue of those who write the online values of a view."""
    return TableKey(f"{found.workspace}/{found.id}/online")


def is_training_table(table: TableKey) -> bool:
    return table.count("/") == 1


def _stored_view(found: StoredObject, row: Any) -> StoredView:
    return StoredView(
        id=found.id,
        workspace=found.workspace,
        zone=found.zone or "",
        label=found.label,
        version=row["version"],
        definition=FeatureView.model_validate(row["definition"]),
        keys=tuple(Feature.model_validate(key) for key in row["keys"]),
        table_version=row["table_version"],
        rows=row["rows"],
        online_version=row["online_version"],
        created_at=row["created_at"],
    )
