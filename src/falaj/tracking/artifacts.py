"""Artifacts of runs and of logged models: files under paths, whose bytes are encrypted blobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import isfinite
from typing import Protocol

from falaj.errors import Conflict, NotFound
from falaj.governance import objects
from falaj.governance.blobs.contents import WrittenBlob
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ByteSource
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import Page, StoredObject
from falaj.records.names import ObjectId
from falaj.records.tracking import Artifact, ArtifactEntry, RemovedArtifacts
from falaj.tracking import metrics, store

HEAD_BYTES = 4096
ZIP_MARK = b"PK\x03\x04"
PICKLE_PROTOCOLS = 15
UNSAFE = (".pkl", ".pickle", ".joblib", ".cloudpickle", ".pt", ".pth", ".bin")
"""How files end that unpickling may open; they are kept as bytes that the platform never opens."""
MOST_METRICS = 1000


class ArtifactBlobs(Protocol):
    """The bytes of artifacts: written first, then published by the transaction that attaches them."""

    def write(self, workspace: ObjectId, data: Iterator[bytes], *, zone: str) -> WrittenBlob: ...

    def publish(self, call: Call, written: WrittenBlob, workspace: ObjectId) -> Blob: ...

    def discard(self, written: WrittenBlob) -> None: ...

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob: ...

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]: ...


class Artifacts:
    """Files of one kind of object; the caller has been authorized for the object."""

    def __init__(self, gate: Gate, blobs: ArtifactBlobs) -> None:
        self._gate = gate
        self._blobs = blobs

    def upload(self, call: Call, path: str, data: Iterator[bytes]) -> Artifact:
        """Store bytes, then attach them under `path` in one transaction; an earlier file there is replaced."""
        owner = call.target
        zone = call.zone or self._gate.zones.default.name
        seen = FirstBytes(data)
        written = self._blobs.write(owner.workspace, iter(seen), zone=zone)
        call.content = written.sha256
        unsafe = looks_pickled(seen.head)
        attached = self._gate.commit(call, lambda: self.attach(call, owner, path, written, unsafe=unsafe))
        if attached.blob != written.id:  # the same upload was sent before, under the same idempotency key
            self._blobs.discard(written)
        return attached

    def attach(
        self, call: Call, owner: StoredObject, path: str, written: WrittenBlob, *, unsafe: bool
    ) -> Artifact:
        """Publish bytes as the file of an owner; an earlier one at that path goes."""
        tx = call.tx
        require_open(tx, owner)
        require_free(tx, owner.id, path)
        earlier = store.artifact_at(tx, owner.id, path)
        if earlier is not None:
            self._remove(call, owner, [earlier])
        blob = self._blobs.publish(call, written, owner.workspace)
        new = Artifact(
            path=path, blob=blob.id, size_bytes=blob.size_bytes, attached_at=call.now, unsafe=unsafe
        )
        store.add_artifact(tx, owner.id, new)
        return new

    def entries(self, call: Call, *, folder: str, after: str, limit: int) -> Page[ArtifactEntry]:
        """Return the files and folders directly in a folder, by path."""
        start = int(self._gate.cursors.read(call, after) or 0)
        found = _entries(store.artifacts_of(call.tx, call.target.id), folder)
        end = start + limit
        following = self._gate.cursors.write(call, str(end)) if len(found) > end else None
        return Page(items=tuple(found[start:end]), next=following)

    def read(self, call: Call, path: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return the bytes of a file, or a range of them, if its blob may be seen and go to where the caller is."""
        return self._blobs.read(self._readable(call, path), offset=offset, length=length)

    def source(self, call: Call, path: str) -> ByteSource:
        """Return a file as what a parser reads by ranges, on the same conditions."""
        blob = self._readable(call, path)

        def read_range(offset: int, length: int) -> bytes:
            return b"".join(self._blobs.read(blob, offset=offset, length=length))

        return ByteSource(blob.size_bytes, read_range)

    def _readable(self, call: Call, path: str) -> Blob:
        owner = call.target
        with self._gate.database.read() as tx:
            found = store.artifact_at(tx, owner.id, path)
            if found is None:
                raise NotFound(f"{owner.kind} {owner.id} has no artifact {path!r}")
            stored = objects.by_id(tx, found.blob)
            seen = partial(self._gate.authorizer.sees, tx, call.caller)
            if stored is None or not seen(stored):
                raise objects.unknown(found.blob, "blob")
            self._gate.zones.require_download(tx, [stored], call.caller.origin, seen=seen)
            return self._blobs.facts(tx, found.blob)

    def delete(self, call: Call, path: str) -> RemovedArtifacts:
        """Delete a file, or a folder with all that is in it; NotFound if there is neither."""
        owner = call.target
        require_open(call.tx, owner)
        found = [
            each
            for each in store.artifacts_of(call.tx, owner.id)
            if each.path == path or each.path.startswith(f"{path}/")
        ]
        if not found:
            raise NotFound(f"{owner.kind} {owner.id} has no artifact {path!r}")
        self._remove(call, owner, found)
        return RemovedArtifacts(paths=tuple(each.path for each in found))

    def _remove(self, call: Call, owner: StoredObject, gone: Sequence[Artifact]) -> None:
        store.delete_artifacts(call.tx, owner.id, [each.path for each in gone])
        delete_own_blobs(call, owner.id, gone)


class LoggedArtifacts:
    """What the model registry takes from runs and logged models: files, the run that made them, and measurements."""

    def files(self, tx: Transaction, owner: StoredObject, folder: str) -> Mapping[str, ObjectId]:
        """Return the blobs of the files in a folder, by their paths in it. Conflict if `owner` is deleted."""
        if _is_deleted(tx, owner):
            raise Conflict(f"{owner.kind} {owner.id} is deleted; restore it first")
        begin = f"{folder}/" if folder else ""
        found = [each for each in store.artifacts_of(tx, owner.id) if each.path.startswith(begin)]
        return {each.path.removeprefix(begin): each.blob for each in found}

    def run_of(self, tx: Transaction, owner: StoredObject) -> ObjectId | None:
        """Return the run that made a logged model, if it said so."""
        found: ObjectId | None = store.model_row(tx, owner.id)["source_run"]
        return found

    def metrics(self, tx: Transaction, owner: StoredObject) -> Mapping[str, float]:
        """Return the newest values that are numbers, by metric."""
        if owner.kind == "run":
            values = {
                each.key: each.last for each in metrics.summaries_of_runs(tx, [owner.id]).get(owner.id, [])
            }
        else:
            measured = metrics.metrics_of_models(tx, [owner.id]).get(owner.id, [])
            values = {each.key: each.value for each in measured}
        return dict(islice(((key, value) for key, value in values.items() if isfinite(value)), MOST_METRICS))


def _is_deleted(tx: Transaction, owner: StoredObject) -> bool:
    if owner.kind == "run":
        return store.run_record(tx, owner).deleted_at is not None
    return store.model_row(tx, owner.id)["deleted_at"] is not None


class FirstBytes:
    """A stream of bytes that keeps its beginning."""

    def __init__(self, data: Iterator[bytes]) -> None:
        self._data = data
        self.head = b""

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._data:
            if len(self.head) < HEAD_BYTES:
                self.head += chunk[: HEAD_BYTES - len(self.head)]
            yield chunk


def looks_pickled(head: bytes) -> bool:
    """Tell whether the first bytes of a file are those of a pickle, or of an archive of torch around one."""
    if head.startswith(ZIP_MARK):
        return b"data.pkl" in head
    return len(head) >= 2 and head[0] == 0x80 and head[1] <= PICKLE_PROTOCOLS


def delete_own_blobs(call: Call, owner: ObjectId, gone: Sequence[Artifact]) -> None:
    """Delete the blobs that existed as these artifacts of `owner` only, which they are no longer.

    One that has a name of its own stays, and so does one that another artifact or a model version consists of, or that
    a job has put out.
    """
    for each in gone:
        blob = objects.by_id(call.tx, each.blob)
        if blob is not None and blob.name == blob.id and _is_unused(call.tx, blob.id, owner):
            objects.delete(call.tx, blob.id, at=call.now)


def _is_unused(tx: Transaction, blob: ObjectId, owner: ObjectId) -> bool:
    """Return whether a blob was made for `owner` alone, and nothing was made of it."""
    sources, made_of_it = _adjacent_objects(tx, blob, up=True), _adjacent_objects(tx, blob, up=False)
    return sources == {owner} and not made_of_it and not store.is_artifact(tx, blob)


def _adjacent_objects(tx: Transaction, blob: ObjectId, *, up: bool) -> set[ObjectId]:
    """Return the objects next to a blob in lineage; between two objects lies the operation that made one of them."""
    return {node for node, (distance, _) in graph.walk(tx, blob, up=up, depth=2).items() if distance == 2}


def require_open(tx: Transaction, owner: StoredObject) -> None:
    """Raise Conflict if a run or a logged model takes no files: it is deleted, or the run of a job that has ended."""
    if owner.kind == "run":
        store.require_active(owner.id, store.lock(tx, owner.id))
    elif store.model_row(tx, owner.id)["deleted_at"] is not None:
        raise Conflict(f"logged model {owner.id} is deleted")


def require_free(tx: Transaction, owner: ObjectId, path: str) -> None:
    """Raise Conflict if `path` is a folder, or a part of it is a file."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    for other in store.artifacts_around(tx, owner, path, above):
        if other in above:
            raise Conflict(f"{other!r} is a file; {path!r} cannot be in it")
        if other.startswith(f"{path}/"):
            raise Conflict(f"{path!r} is a folder: it has {other!r}")


def _entries(found: Sequence[Artifact], folder: str) -> list[ArtifactEntry]:
    begin = f"{folder}/" if folder else ""
    entries: dict[str, ArtifactEntry] = {}
    for each in found:
        if not each.path.startswith(begin):
            continue
        name, slash, _ = each.path.removeprefix(begin).partition("/")
        path = begin + name
        if slash:
            entries[path] = ArtifactEntry(path=path, is_folder=True)
        else:
            unsafe = bool(each.unsafe) or path.lower().endswith(UNSAFE)
            entries[path] = ArtifactEntry(
                path=path, blob=each.blob, size_bytes=each.size_bytes, unsafe=unsafe
            )
    return [entries[path] for path in sorted(entries)]
