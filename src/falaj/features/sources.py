"""Read the rows of uploaded blobs, if the caller may."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select

from falaj.errors import Denied, TooLarge
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.tables import blobs
from falaj.ports.metadata import Transaction
from falaj.ports.queries import ArrowTable
from falaj.records.governance.objects import StoredObject

MAX_SOURCE_BYTES = 2 << 30
"""A source is read into memory as a whole; larger data must be uploaded in parts."""


def uploaded_rows(
    gate: Gate,
    stores: Mapping[str, EncryptedBlobs],
    call: Call,
    blob: StoredObject,
    *,
    texts: frozenset[str] = frozenset(),
) -> ArrowTable:
    """Return the rows of a blob that the caller may read. CSV columns in `texts` are parsed as text."""
    from falaj.features import arrow_tables

    with gate.database.read() as tx:
        require_permission(gate, tx, call, "blobs.read", blob)
        row = tx.execute(select(blobs.c.key, blobs.c.size_bytes).where(blobs.c.id == blob.id)).one()
    if row.size_bytes > MAX_SOURCE_BYTES:
        raise TooLarge(f"blob {blob.name} has {row.size_bytes} bytes; the limit is {MAX_SOURCE_BYTES}")
    store = stores[blob.zone or gate.zones.default.name]
    return arrow_tables.parse(b"".join(store.read(blob.workspace, row.key)), name=blob.name, texts=texts)


def require_permission(gate: Gate, tx: Transaction, call: Call, action: str, found: StoredObject) -> None:
    """Raise Denied unless the caller may do `action` on `found`."""
    decision = gate.authorizer.decide(tx, call.caller, action, found)
    if not decision.allowed:
        raise Denied(f"{call.caller.name} may not {action} on {found.address}: {decision.reason}")
