"""The bytes of blobs, for services whose objects consist of blobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import delete, insert, select, update

from falaj.errors import Conflict
from falaj.governance import backups, objects
from falaj.governance.blobs.direct import UploadGrant
from falaj.governance.blobs.service import blob_record
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.digest import RunningDigest
from falaj.governance.encryption.frames import stored_size
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.operations.call import Call
from falaj.governance.tables import blobs
from falaj.governance.tables import objects as stored
from falaj.ports.blobs import BlobKey
from falaj.ports.metadata import Database, Transaction
from falaj.ports.parsers import ByteSource
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, ObjectId, new_id
from falaj.records.record import utc_now

GRANTED_FOR = timedelta(hours=1)
"""How long a worker may take to upload a blob."""


class WrittenBlob(NamedTuple):
    """Bytes that lie in a store, and that no blob refers to yet; a cleanup removes them unless they are published."""

    id: ObjectId
    key: BlobKey
    zone: str
    size_bytes: int
    sha256: str


class BlobContents:
    """Blobs behind the gate: the caller has been authorized for the object that they belong to."""

    def __init__(
        self, database: Database, stores: Mapping[str, EncryptedBlobs], *, platform: str = ""
    ) -> None:
        """`platform` is the prefix of this platform's keys."""
        self._database = database
        self._stores = stores
        self._prefix = f"{platform}/"

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

    def write(self, workspace: ObjectId, data: Iterator[bytes], *, zone: str) -> WrittenBlob:
        """Store bytes, encrypted; `publish` makes them a blob. The caller may have no open transaction."""
        ident = new_id("blob")
        key = BlobKey(f"{self._prefix}{workspace}/{ident}")
        digest = RunningDigest()
        self._stores[zone].write(workspace, key, digest.follow(data))
        return WrittenBlob(ident, key, zone, digest.size_bytes, digest.hexdigest())

    def publish(self, call: Call, written: WrittenBlob, workspace: ObjectId) -> Blob:
        """Make written bytes a blob without a name, which derives from what the call refers to."""
        home = objects.resolve(call.tx, workspace, kind="workspace", workspace=ROOT)
        new = call.create("blob", workspace=home, zone=written.zone, ident=written.id)
        self.add(call.tx, new, written)
        return blob_record(call.tx, new)

    def add(self, tx: Transaction, found: StoredObject, written: WrittenBlob) -> None:
        """Make written bytes those of an object of another kind, which nobody reads as a blob."""
        require_living_key(tx, found.workspace)
        self._stores[written.zone].size(written.key)  # NotFound if a cleanup was quicker
        row = {"id": found.id, "key": written.key, "size_bytes": written.size_bytes, "sha256": written.sha256}
        tx.execute(insert(blobs), row | {"staged_until": None})

    def remove(self, tx: Transaction, found: StoredObject) -> None:
        """Take its bytes from an object; they go with a later cleanup."""
        tx.execute(delete(blobs).where(blobs.c.id == found.id))

    def source(self, tx: Transaction, found: StoredObject) -> ByteSource | None:
        """Return the bytes of an object of any kind; none if it has none."""
        row = tx.execute(select(blobs.c.key, blobs.c.size_bytes).where(blobs.c.id == found.id)).first()
        if row is None:
            return None
        store = self._stores[found.zone or ""]

        def read_range(offset: int, length: int) -> bytes:
            return b"".join(store.read(found.workspace, BlobKey(row.key), start=offset, length=length))

        return ByteSource(row.size_bytes, read_range)

    def discard(self, written: WrittenBlob) -> None:
        """Remove written bytes that are not to be published."""
        self._stores[written.zone].delete(written.key)

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None:
        """Commit a staged blob under its id, because something refers to it from now on."""
        staged = tx.execute(select(blobs.c.staged_until).where(blobs.c.id == blob.id)).scalar()
        if staged is not None and staged <= now:
            raise Conflict(f"blob {blob.name} was staged too long and has expired; upload it again")
        tx.execute(update(blobs).where(blobs.c.id == blob.id).values(staged_until=None))

    def grant_upload(self, workspace: ObjectId, *, zone: str) -> UploadGrant | None:
        """Return what a worker needs to upload one blob into the store of a zone; none if that takes no uploads.

        It changes nothing: the blob exists once `blobs.upload` was given the StagedUpload, and was permitted.
        """
        ident = new_id("blob")
        key = BlobKey(f"{self._prefix}{workspace}/{ident}")
        opened = self._stores[zone].open_upload(workspace, key, lasts=GRANTED_FOR)
        return None if opened is None else UploadGrant(ident, key, zone, *opened)

    def discard_upload(self, grant: UploadGrant) -> None:
        """Remove what was uploaded by a grant that is not wanted any more."""
        self._stores[grant.zone].discard(grant.address.staged)

    def erase(self, blob: ObjectId) -> None:
        """Remove the bytes of a deleted blob without waiting for a cleanup; those of any other blob stay.

        While a backup is being made they stay, too, and go with a later cleanup.
        """
        query = (
            select(blobs.c.key, stored.c.zone)
            .join(stored, stored.c.id == blobs.c.id)
            .where(blobs.c.id == blob, stored.c.deleted_at.is_not(None))
        )
        with self._database.read() as tx:
            gone = tx.execute(query).first()
            held = backups.is_held(tx, now=utc_now())
        if gone is not None and not held:
            self._stores[gone.zone].delete(BlobKey(gone.key))


def living_blobs(tx: Transaction) -> list[tuple[str, str, int]]:
    """Return zone, key and stored size of every blob that is not deleted; staged ones may go at any time."""
    query = (
        select(stored.c.zone, blobs.c.key, blobs.c.size_bytes)
        .join(stored, stored.c.id == blobs.c.id)
        .where(stored.c.deleted_at.is_(None), blobs.c.staged_until.is_(None))
    )
    return [(row.zone, row.key, stored_size(row.size_bytes)) for row in tx.execute(query)]
