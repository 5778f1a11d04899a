"""Blobs: encrypted bytes, uploaded first and published by one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Protocol

from pydantic import Field
from sqlalchemy import bindparam, insert, select, update

from falaj.errors import Conflict, Damaged, FalajError, ResidencyDenied
from falaj.governance import backups, objects
from falaj.governance.blobs.direct import StagedUpload
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.digest import RunningDigest
from falaj.governance.encryption.keyring import require_living_key, stop_publishing
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.governance.tables import blobs
from falaj.governance.tables import objects as objects_table
from falaj.ports.blobs import BlobKey
from falaj.ports.metadata import Transaction
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.blobs import Blob
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.governance.residency import Label
from falaj.records.names import (
    AnyRef,
    BlobRef,
    DataClass,
    Jurisdiction,
    Name,
    ObjectId,
    WorkspaceRef,
    ZoneName,
    new_id,
)
from falaj.records.record import Record

STAGED_FOR = timedelta(days=1)

_by_id = select(blobs).where(blobs.c.id == bindparam("id"))
_by_ids = objects.RowsByIds(select(blobs), blobs.c.id)

Age = Annotated[timedelta, Field(ge=timedelta(minutes=1), le=timedelta(days=36_500))]
Offset = Annotated[int, Field(ge=0, le=2**62)]


class WorkflowRequests(Protocol):
    """Where an operation requests a workflow, which the controller runs."""

    def request(self, call: Call, workflow: str, given: dict[str, Any]) -> WorkflowRun: ...


class BlobCleanup(Record):
    removed: int


class Blobs:
    """Store bytes, read them, delete them."""

    def __init__(
        self, gate: Gate, stores: Mapping[str, EncryptedBlobs], intents: WorkflowRequests, *, platform: str
    ) -> None:
        """`platform` is the prefix of this platform's keys: several platforms may share a bucket."""
        self.gate = gate
        self._prefix = f"{platform}/"
        self._intents = intents
        self._stores = stores

    @operation("blobs.upload", resource="workspace", mode=Mode.LATE)
    def upload(
        self,
        data: ByteStream,
        *,
        workspace: WorkspaceRef | None = None,
        zone: ZoneName | None = None,
        sources: tuple[AnyRef, ...] = (),
        only: Annotated[tuple[Jurisdiction, ...], Field(min_length=1)] | None = None,
        classes: tuple[DataClass, ...] = (),
    ) -> Blob:
        """Store bytes, encrypted, in a zone. The blob is staged: it has no name until blobs.commit gives it one.

        `sources` are the objects that the bytes came from; their restrictions flow into the blob.
        """
        call = current_call()
        place = self.gate.zones.named(call.zone)
        own = Label(only=None if only is None else frozenset(only), classes=frozenset(classes))
        if not own.permits(place.jurisdiction):
            raise ResidencyDenied(
                f"bytes labelled {own.describe()} may not lie in zone {place.name} ({place.jurisdiction})"
            )
        if isinstance(data, StagedUpload):
            ident, key = data.grant.ident, data.grant.key
            digest = self._adopt(data, call.target.id, place.name)
        else:
            ident = new_id("blob")
            key = BlobKey(f"{self._prefix}{call.target.id}/{ident}")
            digest = RunningDigest()
            self._stores[place.name].write(call.target.id, key, digest.follow(data))
        call.content = digest.hexdigest()

        def publish() -> Blob:
            require_living_key(call.tx, call.target.id)
            self._stores[place.name].size(key)  # NotFound if a cleanup was quicker
            new = call.create("blob", workspace=call.target, zone=place.name, own=own, ident=ident)
            row = {
                "id": ident,
                "key": key,
                "size_bytes": digest.size_bytes,
                "sha256": digest.hexdigest(),
                "staged_until": call.now + STAGED_FOR,
            }
            call.tx.execute(insert(blobs), row)
            return blob_record(call.tx, new)

        blob = self.gate.commit(call, publish)
        if blob.id != ident:  # the same upload was sent before, under the same idempotency key
            self._stores[place.name].delete(key)
        return blob

    def _adopt(self, upload: StagedUpload, workspace: ObjectId, zone: str) -> RunningDigest:
        """Move what a worker uploaded out of its reach, and read it; Damaged if it is not what was announced.

        Until it is recorded it is what an interrupted upload leaves: a cleanup removes it.
        """
        grant, store = upload.grant, self._stores[zone]
        if grant.zone != zone or grant.key != f"{self._prefix}{workspace}/{grant.ident}":
            raise Conflict(f"blob {grant.ident} was to be uploaded into zone {grant.zone}, not {zone}")
        digest = RunningDigest()
        try:
            store.adopt(grant.key, grant.address.staged)
            for _ in digest.follow(store.read(workspace, grant.key)):
                pass
            if (digest.size_bytes, digest.hexdigest()) != (upload.size_bytes, upload.sha256):
                raise Damaged(
                    f"blob {grant.ident} is not what was announced: {digest.size_bytes} bytes arrived"
                )
        except FalajError:
            store.discard(grant.address.staged)
            store.delete(grant.key)
            raise
        return digest

    @operation("blobs.commit", resource="blob")
    def commit(self, blob: BlobRef, *, name: Name) -> Blob:
        """Give a staged blob its name; from then on it stays until it is deleted."""
        call = current_call()
        staged = call.tx.execute(select(blobs.c.staged_until).where(blobs.c.id == call.target.id)).scalar()
        if staged is None:
            raise Conflict(f"blob {call.target.name} is committed already")
        if staged <= call.now:
            raise Conflict(f"blob {call.target.name} was staged too long and has expired; upload it again")
        objects.rename(call.tx, call.target.id, name=name)
        call.tx.execute(update(blobs).where(blobs.c.id == call.target.id).values(staged_until=None))
        return blob_record(call.tx, call.target.model_copy(update={"name": name}))

    @operation("blobs.show", resource="blob", mode=Mode.READ)
    def show(self, blob: BlobRef) -> Blob:
        """Show one blob."""
        return blob_record(current_call().tx, current_call().target)

    @operation("blobs.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Blob]:
        """The blobs of a workspace."""
        return list_workspace_page(self.gate, "blob", blob_records, after=after, limit=limit)

    @operation("blobs.read", resource="blob", mode=Mode.FREE)
    def read(self, blob: BlobRef, *, offset: Offset = 0, length: Offset | None = None) -> ByteStream:
        """The bytes of a blob, or a range of them; a broken read goes on from its offset."""
        call = current_call()
        with self.gate.database.read() as tx:
            row = tx.execute(_by_id, {"id": call.target.id}).one()
        store = self._stores[call.target.zone or self.gate.zones.default.name]
        return store.read(call.target.workspace, row.key, start=offset, length=length)

    @operation("blobs.delete", resource="blob", confirm=True)
    def delete(self, blob: BlobRef) -> Blob:
        """Delete a blob: its name is free at once, its bytes go with the next cleanup."""
        call = current_call()
        gone = blob_record(call.tx, call.target)
        objects.delete(call.tx, call.target.id, at=call.now)
        return gone

    @operation("blobs.copy", resource="blob")
    def copy(self, blob: BlobRef, zone: ZoneName, *, name: Name) -> WorkflowRun:
        """Copy a blob into another zone, under a name; its restrictions go with it."""
        call = current_call()
        given = {"blob": call.target.id, "workspace": call.target.workspace, "zone": zone, "name": name}
        return self._intents.request(call, "blobs.copy", given)

    @operation("blobs.cleanup", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR)
    def cleanup(self, *, older_than: Age = STAGED_FOR) -> BlobCleanup:
        """Remove bytes that no blob refers to: interrupted uploads, staged blobs that expired, deleted ones."""
        call = current_call()
        before = call.now - older_than
        removed = sum(1 for store in self._stores.values() for _ in self._orphans(store, before))
        removed += sum(store.delete_incomplete(before=before) for store in self._stores.values())
        return self.gate.commit(call, lambda: BlobCleanup(removed=removed))

    def _orphans(self, store: EncryptedBlobs, before: datetime) -> Iterator[BlobKey]:
        for stored in store.list(self._prefix):
            if stored.modified_at < before and self._remove_orphan(store, stored.key, before):
                yield stored.key

    def _remove_orphan(self, store: EncryptedBlobs, key: BlobKey, before: datetime) -> bool:
        """Delete `key` if no blob refers to it; whether. One that is being published just now is waited for.

        While a backup is being made nothing is deleted: its database may refer to it.
        """
        with self.gate.database.read() as tx:
            if backups.is_held(tx, now=self.gate.clock()) or _is_living(tx, key, now=before):
                return False
        with self.gate.database.write() as tx:
            stop_publishing(tx, key.split("/")[-2])
            if _is_living(tx, key, now=before):
                return False
            store.delete(key)
        return True


def blob_record(tx: Transaction, found: StoredObject) -> Blob:
    return blob_records(tx, [found])[0]


def blob_records(tx: Transaction, page: Sequence[StoredObject]) -> list[Blob]:
    known = {row["id"]: row for row in _by_ids.fetch(tx, [each.id for each in page])}
    return [_blob(each, known[each.id]) for each in page]


def _blob(found: StoredObject, row: Mapping[str, Any]) -> Blob:
    return Blob(
        id=found.id,
        workspace=found.workspace,
        name=found.name,
        zone=found.zone or "",
        size_bytes=row["size_bytes"],
        sha256=row["sha256"],
        label=found.label,
        created_at=found.created_at,
        committed=row["staged_until"] is None,
    )


def _is_living(tx: Transaction, key: str, *, now: datetime) -> bool:
    query = (
        select(blobs.c.staged_until)
        .join(objects_table, objects_table.c.id == blobs.c.id)
        .where(blobs.c.key == key, objects_table.c.deleted_at.is_(None))
    )
    row = tx.execute(query).first()
    return row is not None and (row.staged_until is None or row.staged_until > now)
