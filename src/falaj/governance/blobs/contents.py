"""The bytes of blobs, for services whose objects consist of blobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from sqlalchemy import select, update

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.blobs.service import blob_record
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.tables import blobs
from falaj.governance.tables import objects as stored
from falaj.ports.blobs import BlobKey
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.blobs import Blob
from falaj.records.names import ObjectId


class BlobContents:
    """Reads blobs behind the gate: the caller has been authorized for the object that the blobs belong to."""

    def __init__(self, database: Database, stores: Mapping[str, EncryptedBlobs]) -> None:
        self._database = database
        self._stores = stores

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob:
        """Return the record of a blob; raise NotFound if it was deleted."""
        found = objects.by_id(tx, blob)
        if found is None or found.kind != "blob":
            raise objects.unknown(blob, "blob")
        return blob_record(tx, found)

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return the bytes from `offset`, at most `length` of them; the caller may have no open transaction."""
        with self._database.read() as tx:
            key = tx.execute(select(blobs.c.key).where(blobs.c.id == blob.id)).scalar_one()
        return self._stores[blob.zone].read(blob.workspace, BlobKey(key), start=offset, length=length)

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None:
        """Commit a staged blob under its id, because something refers to it from now on."""
        staged = tx.execute(select(blobs.c.staged_until).where(blobs.c.id == blob.id)).scalar()
        if staged is not None and staged <= now:
            raise Conflict(f"blob {blob.name} was staged too long and has expired; upload it again")
        tx.execute(update(blobs).where(blobs.c.id == blob.id).values(staged_until=None))

    def erase(self, blob: ObjectId) -> None:
        """Remove the bytes of a deleted blob without waiting for a cleanup; those of any other blob stay."""
        query = (
            select(blobs.c.key, stored.c.zone)
            .join(stored, stored.c.id == blobs.c.id)
            .where(blobs.c.id == blob, stored.c.deleted_at.is_not(None))
        )
        with self._database.read() as tx:
            gone = tx.execute(query).first()
        if gone is not None:
            self._stores[gone.zone].delete(BlobKey(gone.key))
