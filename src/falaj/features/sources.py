"""From uploaded bytes to rows: what a caller may read of a blob."""

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

LARGEST_BYTES = 2 << 30
"""A source is read into memory whole; more rows come as several uploads."""


def uploaded_rows(
    gate: Gate,
    stores: Mapping[str, EncryptedBlobs],
    call: Call,
    blob: StoredObject,
    *,
    texts: frozenset[str] = frozenset(),
) -> ArrowTable:
    """The rows in a blob that the caller may read. In CSV, the columns in `texts` are not taken for numbers."""
    from falaj.features import arrow_tables

    with gate.database.read() as tx:
        require_permission(gate, tx, call, "blobs.read", blob)
        row = tx.execute(select(blobs.c.key, blobs.c.size_bytes).where(blobs.c.id == blob.id)).one()
    if row.size_bytes > LARGEST_BYTES:
        raise TooLarge(f"blob {blob.name} has {row.size_bytes} bytes; a source may have {LARGEST_BYTES}")
    store = stores[blob.zone or gate.zones.default.name]
    return arrow_tables.parse(b"".join(store.read(blob.workspace, row.key)), name=blob.name, texts=texts)


def require_permission(gate: Gate, tx: Transaction, call: Call, action: str, found: StoredObject) -> None:
    """Whoever uses an object as a source must be allowed to read it, not only to see it."""
    decision = gate.authorizer.decide(tx, call.caller, action, found)
    if not decision.allowed:
        raise Denied(f"{call.caller.name} may not {action} on {found.address}: {decision.reason}")
