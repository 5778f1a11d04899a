"""Quarantined batches: the invalid rows of a file, encrypted, as an object that derives from the file and its view."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import RowMapping

from falaj.errors import Conflict, Internal, KeyUnavailable
from falaj.features import store
from falaj.features.backends import FeatureBackends
from falaj.features.sources import MAX_ROWS_BYTES, ViewRows
from falaj.governance import objects
from falaj.governance.blobs.contents import WrittenBlob
from falaj.governance.encryption.keyring import has_living_key
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ByteSource
from falaj.ports.queries import ArrowTable
from falaj.records.features import (
    BrokenRule,
    DiscardResult,
    IngestResult,
    QuarantinedBatch,
    QuarantinedRow,
    QuarantinedRows,
    StoredView,
)
from falaj.records.governance.objects import Page, StoredObject
from falaj.records.names import ROOT

PAGE = "quarantine_page"
"""The name of the parser, see assembly/parsing.py."""
NAME_LIMIT = 128


@dataclass
class WrittenBatch:
    """Invalid rows that are stored, and whether a transaction refers to them."""

    blob: WrittenBlob
    is_published: bool = False


@contextmanager
def written(
    backends: FeatureBackends, view: StoredView, invalid: ArrowTable | None
) -> Iterator[WrittenBatch | None]:
    """Store invalid rows, encrypted, where those of their view lie. They are removed unless they are published."""
    from falaj.governance import arrow_ipc

    if invalid is None:
        yield None
        return
    content = arrow_ipc.write_table(invalid).to_pybytes()
    batch = WrittenBatch(backends.contents.write(view.workspace, iter([content]), zone=view.zone))
    try:
        yield batch
    finally:
        if not batch.is_published:
            backends.contents.discard(batch.blob)


def add(
    backends: FeatureBackends,
    call: Call,
    view: StoredView,
    given: ViewRows,
    new: WrittenBatch,
    done: IngestResult,
    *,
    sha256: str,
    is_history: bool,
) -> IngestResult:
    """Record the invalid rows of an upload as a batch, and return what the ingestion answers."""
    rows, number = _count(given), store.next_quarantined(call.tx, view)
    name = f"{view.definition.name}-{number}"
    home = objects.resolve(call.tx, view.workspace, kind="workspace", workspace=ROOT)
    made = call.create(
        "quarantine", name if len(name) <= NAME_LIMIT else None, workspace=home, zone=view.zone
    )
    backends.contents.add(call.tx, made, new.blob)
    facts = {
        "view": view.id,
        "number": number,
        "version": view.version,
        "data": call.object("data").id,
        "sha256": sha256,
        "is_history": is_history,
        "quarantined": rows,
        "rows": rows,
        "rules": _stored_rules(given),
    }
    store.add_quarantined(call, made, facts)
    new.is_published = True
    return done.model_copy(update={"quarantined": rows, "batch": made.name, "rules": given.broken})


def keep_left(
    backends: FeatureBackends,
    call: Call,
    batch: RowMapping,
    given: ViewRows,
    left: WrittenBatch | None,
    done: IngestResult,
) -> IngestResult:
    """Record that rows of a batch were ingested and which are left, and return what the ingestion answers.

    Lineage has the file as their source, not the batch: that derives from the view, and lineage has no cycles.
    """
    target = call.object("batch")
    changes: dict[str, Any] = {"rows": _count(given), "ingested": batch["ingested"] + done.added}
    backends.contents.remove(call.tx, target)
    if left is not None:
        backends.contents.add(call.tx, target, left.blob)
        left.is_published = True
        changes["rules"] = _stored_rules(given)
    store.change_quarantined(call, batch, changes)
    file, view = objects.ever(call.tx, batch["data"]), objects.by_id(call.tx, batch["view"])
    if file is not None and view is not None:
        graph.flow(call, [file], view)
    return still_quarantined(target, given, done)


def still_quarantined(batch: StoredObject, given: ViewRows, done: IngestResult) -> IngestResult:
    """Return the result of an ingestion from a batch with the rows that are left in it."""
    return done.model_copy(update={"quarantined": _count(given), "batch": batch.name, "rules": given.broken})


def discard(backends: FeatureBackends, call: Call, target: StoredObject) -> DiscardResult:
    """Delete the rows of a batch; its record stays."""
    batch = store.load_quarantined(call.tx, target)
    if backends.contents.source(call.tx, target) is None:
        raise _nothing_left(target)
    store.change_quarantined(call, batch, {"rows": 0})
    backends.contents.remove(call.tx, target)
    return DiscardResult(batch=target.name, discarded=batch["rows"])


def list_batches(
    gate: Gate, call: Call, target: StoredObject, *, after: str, limit: int
) -> Page[QuarantinedBatch]:
    """Return the batches of a view, newest first."""
    position = gate.cursors.read(call, after)
    before = int(position) if position else None
    found = store.list_quarantined(call.tx, target.id, before=before, limit=limit + 1)
    shown = found[:limit]
    ids = {row[column] for row in shown for column in ("data", "id")}
    known = {ident: each for ident in ids if (each := objects.ever(call.tx, ident)) is not None}
    seen = {each.id for each in gate.visible([*known.values()])}
    following = gate.cursors.write(call, str(shown[-1]["number"])) if len(found) > limit else None
    items = tuple(
        _batch(row, known[row["id"]].name, known[row["data"]].name if row["data"] in seen else "")
        for row in shown
    )
    return Page(items=items, next=following)


def show_rows(
    backends: FeatureBackends, call: Call, target: StoredObject, *, after: str, limit: int
) -> QuarantinedRows:
    """Return rows of a batch in the order of their file. The caller must be allowed to read the rows of the view."""
    gate = backends.gate
    position = gate.cursors.read(call, after)
    with gate.database.read() as tx:
        gate.require(call, "features.scan", view_of(tx, target), tx=tx)
        rows = source(backends, tx, target)
    options = {
        "name": target.name,
        "texts": [],
        "limit_bytes": MAX_ROWS_BYTES,
        "after": int(position or 0),
        "limit": limit,
    }
    facts = backends.parsers.parse(PAGE, [rows], options, owner=call.caller.id).facts
    try:
        items = tuple(QuarantinedRow.model_validate(each) for each in facts["items"])
        following = gate.cursors.write(call, str(items[-1].row)) if facts["more"] else None
        return QuarantinedRows(columns=tuple(facts["columns"]), items=items, next=following)
    except (KeyError, TypeError, IndexError, ValidationError) as error:  # of a process that was taken over
        raise Internal("the parser returned no rows") from error


def view_of(tx: Transaction, batch: StoredObject) -> StoredObject:
    """Return the view that rows were to be added to."""
    ident = store.load_quarantined(tx, batch)["view"]
    found = objects.by_id(tx, ident)
    if found is None:
        raise objects.unknown(ident, "view")
    return found


def source(backends: FeatureBackends, tx: Transaction, batch: StoredObject) -> ByteSource:
    """Return the stored rows of a batch. Raise Conflict if none are left, and KeyUnavailable if they were erased."""
    found = backends.contents.source(tx, batch)
    if found is None:
        raise _nothing_left(batch)
    if not has_living_key(tx, batch.workspace):  # the keyring knows it a moment later
        raise KeyUnavailable(f"the rows of {batch.name} were erased with the keys of its workspace")
    return found


def _nothing_left(batch: StoredObject) -> Conflict:
    return Conflict(f"no rows are left in {batch.name}: they were ingested or discarded")


def _count(given: ViewRows) -> int:
    return 0 if given.invalid is None else int(given.invalid.num_rows)


def _stored_rules(given: ViewRows) -> list[dict[str, Any]]:
    return [each.model_dump(mode="json") for each in given.broken]


def _batch(row: RowMapping, name: str, file: str) -> QuarantinedBatch:
    return QuarantinedBatch(
        id=row["id"],
        name=name,
        view=row["view"],
        version=row["version"],
        file=file,
        sha256=row["sha256"],
        by=row["by"],
        at=row["at"],
        rows=row["rows"],
        quarantined=row["quarantined"],
        ingested=row["ingested"],
        discarded=row["quarantined"] - row["ingested"] - row["rows"],
        rules=tuple(BrokenRule.model_validate(each) for each in row["rules"]),
    )
