"""The deep check: the stores against the log. It names rows, tables and blobs that were changed outside of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from sqlalchemy import func, select

from falaj.errors import Damaged, FalajError, NotFound
from falaj.governance import objects as stored_objects
from falaj.governance.audit.rows import (
    Digest,
    Key,
    RowChange,
    RowShape,
    recorded_shapes,
    stored_row,
    stored_rows,
)
from falaj.governance.lineage import graph
from falaj.governance.tables import audit_entries, audit_state, blobs, objects
from falaj.ports.blobs import BlobKey
from falaj.ports.metadata import Database, Transaction
from falaj.ports.tables import TableKey
from falaj.records.names import ObjectId

TABLE = "table"
"""The kind of what is published as a version of a table."""
PAGE = 1000
NAMED = 5
"""How many objects or versions a problem names."""

Row = tuple[str, Key]


class TableDigests(Protocol):
    """The digests of versions of a table, each over the paths, sizes and hashes of its files as they are now.

    Every file is hashed once. Raise NotFound if the table or version is gone, Damaged with the files that are not what
    was published.
    """

    def __call__(self, zone: str, table: TableKey, versions: Sequence[int], /) -> Mapping[int, str]: ...


class ReadBlob(Protocol):
    """The plain bytes of a stored blob, in chunks. Raise NotFound if it is gone, Damaged if it was altered."""

    def __call__(self, zone: str, workspace: str, key: BlobKey, /) -> Iterator[bytes]: ...


class AuditedStores(NamedTuple):
    """The stores beside the database that the log vouches for."""

    read_blob: ReadBlob
    table_digests: TableDigests


class Published(NamedTuple):
    """A table version, and the digest that its audit entry has."""

    version: int
    digest: str
    seq: int


class PublishedBlob(NamedTuple):
    """A blob that is not deleted, with the size and hash that its row has; the log vouches for the row."""

    id: ObjectId
    name: str
    workspace: str
    zone: str | None
    key: BlobKey
    size_bytes: int
    sha256: str


class Replay:
    """What the stores must contain by the entries so far: the digest of each row, and of each version of a table."""

    def __init__(self) -> None:
        self.rows: dict[Row, str] = {}
        self.tables: dict[str, dict[int, Published]] = {}
        self.problems: list[str] = []
        self.size = 0

    def take(self, entry: Mapping[str, Any]) -> list[Row]:
        """Follow one entry; return the rows that it changed."""
        self.size = entry["seq"] + 1
        changed = [RowChange(table, tuple(key), was, now) for table, key, was, now in entry.get("rows", ())]
        for change in changed:
            row = change.table, change.key
            if self.rows.get(row) != change.was:
                self.problems.append(
                    f"{name_of(row)} was altered outside the log before entry {entry['seq']}."
                )
            if change.now is None:
                self.rows.pop(row, None)
            else:
                self.rows[row] = change.now
        for each in entry.get("published", ()):
            if each["kind"] == TABLE:
                published = Published(each["version"], each["digest"], entry["seq"])
                self.tables.setdefault(each["ref"], {})[published.version] = published
        return [(change.table, change.key) for change in changed]


def differing_rows(database: Database, replay: Replay, digest: Digest) -> list[RowChange]:
    """Return the rows that are not as the log has them: what it says, and what is stored.

    The first look takes no locks. What differs then, and what was changed meanwhile, is looked at again while nobody
    can append to the log.
    """
    shapes = {shape.name: shape for shape in recorded_shapes()}
    suspects = set(replay.rows)
    with database.read() as tx:
        for shape in shapes.values():
            for key, stored in stored_rows(tx, shape, digest):
                if replay.rows.get((shape.name, key)) == stored:
                    suspects.discard((shape.name, key))
                else:
                    suspects.add((shape.name, key))
    with database.write() as tx:
        tx.execute(select(audit_state.c.size).with_for_update())
        for entry in entries_from(tx, replay.size):
            suspects.update(replay.take(entry))
        return sorted(_different(tx, shapes, suspects, replay, digest))


def differences(tx: Transaction, replay: Replay, digest: Digest) -> list[RowChange]:
    """Return the same within a transaction that has locked the log."""
    shapes = {shape.name: shape for shape in recorded_shapes()}
    stored = {(shape.name, key) for shape in shapes.values() for key, _ in stored_rows(tx, shape, digest)}
    return sorted(_different(tx, shapes, stored | set(replay.rows), replay, digest))


def entries_from(tx: Transaction, first: int) -> Iterator[dict[str, Any]]:
    """Return the entries that changed something, from `first` on."""
    query = select(audit_entries.c.entry).where(audit_entries.c.seq >= first).order_by(audit_entries.c.seq)
    return (json.loads(text) for text in tx.execute(query).scalars())


def row_problem(change: RowChange) -> str:
    """Say how a row differs from the log."""
    what = "was altered" if change.was and change.now else "was removed" if change.was else "was added"
    return f"{name_of((change.table, change.key))} {what} outside the log."


def table_problems(database: Database, replay: Replay, digests: TableDigests) -> Iterator[str]:
    """Say which versions of tables do not consist of the files that were published.

    Training sets pin old versions, so that each version counts, not only the newest.
    """
    for ref, versions in sorted(replay.tables.items()):
        zone, _, table = ref.partition("/")
        with database.read() as tx:
            where = f"Table {table}{_owner(tx, table)} in zone {zone}"
        try:
            stored = digests(zone, TableKey(table), sorted(versions))
        except NotFound:
            yield f"{where} is missing."
        except Damaged as error:
            files = "; ".join(fault.where for fault in error.faults)
            yield f"{where} was altered outside the log: {files} are not what was published."
        else:
            wrong = [each for each in versions.values() if stored.get(each.version) != each.digest]
            if wrong:
                which = ", ".join(f"{each.version} (entry {each.seq})" for each in wrong[:NAMED])
                more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
                yield (
                    f"{where} was altered outside the log: its files are not those that were published as "
                    f"version {which}{more}."
                )


def blob_pages(database: Database) -> Iterator[Sequence[PublishedBlob]]:
    """Return the blobs that are not deleted, in pages; staged ones may go at any time."""
    columns = blobs.c.id, objects.c.name, objects.c.workspace, objects.c.zone, blobs.c.key
    query = (
        select(*columns, blobs.c.size_bytes, blobs.c.sha256)
        .join(objects, objects.c.id == blobs.c.id)
        .where(objects.c.deleted_at.is_(None), blobs.c.staged_until.is_(None))
        .order_by(blobs.c.id)
        .limit(PAGE)
    )
    after = ""
    while True:
        with database.read() as tx:
            page = [PublishedBlob(*row) for row in tx.execute(query.where(blobs.c.id > after)).all()]
        if not page:
            return
        yield page
        after = page[-1].id


def blob_bytes(database: Database) -> int:
    """Return the size of all blobs that are not deleted."""
    living = objects.c.deleted_at.is_(None), blobs.c.staged_until.is_(None)
    query = select(func.coalesce(func.sum(blobs.c.size_bytes), 0)).join(objects, objects.c.id == blobs.c.id)
    with database.read() as tx:
        return int(tx.execute(query.where(*living)).scalar_one())


def check_blob(blob: PublishedBlob, read: ReadBlob, *, default_zone: str) -> Iterator[int]:
    """Hash the bytes of a blob; yield how many with each chunk. Raise NotFound or Damaged."""
    digest, size = sha256(), 0
    for chunk in read(blob.zone or default_zone, blob.workspace, blob.key):
        digest.update(chunk)
        size += len(chunk)
        yield len(chunk)
    if size != blob.size_bytes:
        raise Damaged(f"it has {size} bytes; {blob.size_bytes} were published")
    if digest.hexdigest() != blob.sha256:
        raise Damaged(f"its bytes have the SHA-256 {digest.hexdigest()}; {blob.sha256} was published")


def blob_problem(database: Database, blob: PublishedBlob, error: FalajError) -> str | None:
    """Say what is wrong with a blob and what refers to it; nothing if it was deleted meanwhile."""
    with database.read() as tx:
        if (found := tx.execute(select(objects.c.deleted_at).where(objects.c.id == blob.id)).first()) is None:
            return None
        if found.deleted_at is not None:
            return None
        used = _neighbours(tx, blob.id)
    what = f"Blob {blob.name} ({blob.id}){used}"
    if isinstance(error, NotFound):
        return f"The bytes of {what[0].lower()}{what[1:]} are missing."
    return f"{what} is damaged: {error.message}."


def _different(
    tx: Transaction, shapes: Mapping[str, RowShape], rows: set[Row], replay: Replay, digest: Digest
) -> Iterator[RowChange]:
    for table, key in rows:
        said = replay.rows.get((table, key))
        stored = stored_row(tx, shapes[table], key, digest) if table in shapes else None
        if said != stored:
            yield RowChange(table, key, said, stored)


def _owner(tx: Transaction, table: str) -> str:
    """Return the view or training set of a table in words, and what was made from it."""
    parts = table.split("/")
    found = stored_objects.ever(tx, parts[1]) if len(parts) > 1 else None
    return "" if found is None else f" of {found.address}{_neighbours(tx, found.id)}"


def _neighbours(tx: Transaction, ident: ObjectId) -> str:
    """Return in words what was made from an object and what it was made from, by one operation each."""
    words = []
    for verb, up in (("used by", False), ("made from", True)):
        reached = [node for node in graph.walk(tx, ident, up=up, depth=2) if node != ident]
        found = [each for node in reached if (each := stored_objects.ever(tx, node)) is not None]
        if found:
            more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
            words.append(f"{verb} {', '.join(each.address for each in found[:NAMED])}{more}")
    return f", {'; '.join(words)}," if words else ""


def name_of(row: Row) -> str:
    table, key = row
    return f"Row {'/'.join(str(part) for part in key)} of {table}"
