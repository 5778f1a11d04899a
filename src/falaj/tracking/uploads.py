"""Operations on uploads: large files of runs and logged models that arrive in parts, and become one file or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, NamedTuple

from pydantic import Field
from sqlalchemy import RowMapping, delete, insert, select

from falaj.errors import Conflict, InvalidInput
from falaj.governance import objects
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.ports.metadata import Transaction
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.names import AnyRef, ObjectId, ZoneName
from falaj.records.tracking import (
    Artifact,
    ArtifactPath,
    PartNumber,
    Upload,
    UploadedPart,
    UploadRef,
)
from falaj.tracking import store
from falaj.tracking.artifacts import (
    ArtifactBlobs,
    Artifacts,
    FirstBytes,
    looks_pickled,
    require_free,
    require_open,
)
from falaj.tracking.tables import upload_parts, uploads

KEPT = timedelta(days=1)
"""How long parts are kept of an upload that is never completed."""
STORED_BY = {"run": "runs.upload_artifact", "logged_model": "loggedmodels.upload_artifact"}
"""The kinds that have files, and the action that the caller must be allowed to perform on each."""
Parts = Annotated[tuple[UploadedPart, ...], Field(min_length=1, max_length=10_000)]


class Uploads:
    """Upload a file in parts, several at a time: start, send the parts, complete or abort."""

    def __init__(self, gate: Gate, blobs: ArtifactBlobs) -> None:
        self.gate = gate
        self._blobs = blobs
        self._artifacts = Artifacts(gate, blobs)

    @operation("uploads.start", resource="object")
    def start(self, owner: AnyRef, path: ArtifactPath) -> Upload:
        """Start the upload of a file of a run or a logged model; it expires after a day."""
        call = current_call()
        self._require_storable(call, call.tx, call.target)
        require_open(call.tx, call.target)
        require_free(call.tx, call.target.id, path)
        home = store.workspace_of(call.tx, call.target)
        new = call.create("upload", workspace=home)
        row = {"id": new.id, "owner": call.target.id, "path": path, "started_at": call.now}
        call.tx.execute(insert(uploads), row)
        return Upload(id=new.id, owner=call.target.id, path=path)

    @operation("uploads.send_part", resource="upload", mode=Mode.LATE)
    def send_part(
        self, upload: UploadRef, number: PartNumber, data: ByteStream, *, zone: ZoneName | None = None
    ) -> UploadedPart:
        """Store one part of an upload, encrypted; an earlier part of this number is replaced."""
        call = current_call()
        with self.gate.database.read() as tx:
            self._require_storable(call, tx, _owner(tx, _row(tx, call.target)))
        place = call.zone or self.gate.zones.default.name
        written = self._blobs.write(call.target.workspace, data, zone=place)
        call.content = written.sha256

        def publish() -> UploadedPart:
            row = _row(call.tx, call.target)
            self._require_storable(call, call.tx, _owner(call.tx, row))
            _delete_parts(call, [each for each in _parts(call.tx, call.target.id) if each.number == number])
            self._blobs.publish(call, written, call.target.workspace)
            part = {"upload": call.target.id, "number": number, "blob": written.id}
            call.tx.execute(insert(upload_parts), part)
            return UploadedPart(number=number, sha256=written.sha256)

        sent = self.gate.commit(call, publish)
        if sent.sha256 != written.sha256:  # another part was sent before, under the same idempotency key
            self._blobs.discard(written)
        return sent

    @operation("uploads.complete", resource="upload", mode=Mode.LATE)
    def complete(self, upload: UploadRef, *, parts: Parts) -> Artifact:
        """Make the parts of an upload, in the order of their numbers, the file that it was started for."""
        call = current_call()
        with self.gate.database.read() as tx:
            self._require_storable(call, tx, _owner(tx, _row(tx, call.target)))
            kept = _parts(tx, call.target.id)
            blobs = [self._blobs.facts(tx, each.blob) for each in kept]
        _require_all(parts, kept, blobs)
        seen = FirstBytes(chunk for blob in blobs for chunk in self._blobs.read(blob))
        written = self._blobs.write(call.target.workspace, iter(seen), zone=blobs[0].zone)
        call.content = written.sha256
        unsafe = looks_pickled(seen.head)

        def publish() -> Artifact:
            row, target = _row(call.tx, call.target), call.target
            if _parts(call.tx, target.id) != kept:
                raise Conflict(f"the parts of {target.id} changed while they were put together")
            owner = _owner(call.tx, row)
            self._require_storable(call, call.tx, owner)
            call.referred = {"owner": [owner]}  # the file derives from what it belongs to
            _remove(call, target)
            return self._artifacts.attach(call, owner, row["path"], written, unsafe=unsafe)

        return self.gate.commit(call, publish)

    @operation("uploads.abort", resource="upload")
    def abort(self, upload: UploadRef) -> Upload:
        """Give an upload up, and delete its parts."""
        call = current_call()
        row = _row(call.tx, call.target)
        self._require_storable(call, call.tx, _owner(call.tx, row))
        _remove(call, call.target)
        return Upload(id=call.target.id, owner=row["owner"], path=row["path"])

    def _require_storable(self, call: Call, tx: Transaction, owner: StoredObject) -> None:
        if owner.kind not in STORED_BY:
            raise InvalidInput.at("owner", given=f"a {owner.kind}", allowed="a run or a logged model")
        self.gate.require(call, STORED_BY[owner.kind], owner, tx=tx)


def remove_expired(call: Call, *, limit: int) -> int:
    """Remove uploads that were not completed in time, at most so many; return how many."""
    query = select(uploads.c.id).where(uploads.c.started_at < call.now - KEPT).limit(limit)
    found = [objects.by_id(call.tx, ident) for ident in call.tx.execute(query).scalars()]
    for each in found:
        if each is not None:
            _remove(call, each)
    return len(found)


class _Part(NamedTuple):
    number: int
    blob: ObjectId


def _row(tx: Transaction, upload: StoredObject) -> RowMapping:
    row = tx.execute(select(uploads).where(uploads.c.id == upload.id).with_for_update()).mappings().first()
    if row is None:
        raise objects.unknown(upload.id, "upload")
    return row


def _owner(tx: Transaction, row: RowMapping) -> StoredObject:
    found = objects.by_id(tx, row["owner"])
    if found is None:
        raise objects.unknown(row["owner"], "run")
    return found


def _parts(tx: Transaction, upload: ObjectId) -> list[_Part]:
    columns = upload_parts.c.number, upload_parts.c.blob
    query = select(*columns).where(upload_parts.c.upload == upload).order_by(upload_parts.c.number)
    return [_Part(number, blob) for number, blob in tx.execute(query)]


def _require_all(given: Sequence[UploadedPart], kept: Sequence[_Part], blobs: Sequence[Blob]) -> None:
    """Raise InvalidInput unless the caller names exactly the parts that are here, without a gap."""
    here = {part.number: blob.sha256 for part, blob in zip(kept, blobs, strict=True)}
    named = {part.number: part.sha256 for part in given}
    if named != here or len(given) != len(here) or sorted(here) != list(range(1, len(here) + 1)):
        wrong = sorted(
            {*here, *named, *range(1, len(here) + 1)} - {n for n in here if named.get(n) == here[n]}
        )
        raise InvalidInput.at(
            "parts",
            given=f"{len(given)} parts; wrong or missing: {', '.join(map(str, wrong[:20])) or 'none'}",
            allowed="each part that was sent, once, with its hash, numbered from 1",
        )


def _delete_parts(call: Call, gone: Sequence[_Part]) -> None:
    for part in gone:
        condition = upload_parts.c.upload == call.target.id, upload_parts.c.number == part.number
        call.tx.execute(delete(upload_parts).where(*condition))
        objects.delete(call.tx, part.blob, at=call.now)


def _remove(call: Call, upload: StoredObject) -> None:
    """Delete an upload with its parts; the bytes go with the next cleanup of blobs."""
    for part in _parts(call.tx, upload.id):
        objects.delete(call.tx, part.blob, at=call.now)
    call.tx.execute(delete(upload_parts).where(upload_parts.c.upload == upload.id))
    call.tx.execute(delete(uploads).where(uploads.c.id == upload.id))
    objects.delete(call.tx, upload.id, at=call.now)
