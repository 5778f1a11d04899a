"""The stores of each zone, as the home that used them first registered them in the metadata database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import delete, insert, select

from falaj.governance.objects import stored_object
from falaj.governance.tables import objects, stores
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Label


class RegisteredStore(NamedTuple):
    """A store of a zone; `kind` is blobs, tables or online. `home`, `host` and `place` are those of its first user."""

    zone: str
    kind: str
    id: str
    home: str
    host: str
    place: str


def registered_stores(tx: Transaction) -> dict[tuple[str, str], RegisteredStore]:
    """Return the stores by zone and kind."""
    columns = [stores.c[name] for name in RegisteredStore._fields]
    return {(row.zone, row.kind): RegisteredStore(*row) for row in tx.execute(select(*columns))}


def register_stores(tx: Transaction, found: Sequence[RegisteredStore]) -> None:
    """Register stores; each replaces what the same home registered before. Raise Conflict if another home did."""
    for each in found:
        own = stores.c.zone == each.zone, stores.c.kind == each.kind, stores.c.home == each.home
        tx.execute(delete(stores).where(*own))
        tx.execute(insert(stores), each._asdict())


def bound_zones(tx: Transaction, jurisdiction: str) -> dict[str | None, StoredObject]:
    """Return the zones with data that may not lie in `jurisdiction`, each with an object that may not."""
    living = objects.c.deleted_at.is_(None), objects.c.zone.is_not(None)
    labels = select(objects.c.zone, objects.c.label).where(*living).distinct()
    found: dict[str | None, StoredObject] = {}
    for zone, label in tx.execute(labels).all():
        if zone not in found and label and not Label.model_validate(label).permits(jurisdiction):
            same = select(objects).where(*living, objects.c.zone == zone, objects.c.label == label)
            found[zone] = stored_object(tx.execute(same.limit(1)).mappings().one())
    return found
