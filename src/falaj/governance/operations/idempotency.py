"""Once only: the answer of a write is kept under its key, sealed, in the transaction of the write."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple, Protocol

from sqlalchemy import bindparam, delete, select

from falaj.errors import Fenced, KeyReused
from falaj.governance.operations.call import Call
from falaj.governance.tables import idempotency
from falaj.ports.metadata import Transaction, to_micros

_recall = select(idempotency).where(
    idempotency.c.caller == bindparam("caller"), idempotency.c.key == bindparam("key")
)
_CLAIM = (
    "INSERT INTO governance_idempotency (caller, key, action, input, result, at) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT DO NOTHING RETURNING key"
)
_REMEMBER = "UPDATE governance_idempotency SET result = ? WHERE caller = ? AND key = ?"


class Seal(Protocol):
    """Encrypts what lies in the metadata database but is nobody's to read there."""

    def seal(self, data: bytes, *, context: bytes) -> bytes: ...

    def unseal(self, sealed: bytes, *, context: bytes) -> bytes: ...


class StoredAnswer(NamedTuple):
    value: Any


def claim(call: Call, tx: Transaction, seal: Seal) -> StoredAnswer | None:
    """Take the key for this call, or the answer that was given under it.

    Taken first, so that a second call with the same key at the same time waits for the first and then repeats it.
    """
    if call.terms.key is None:
        return None
    row = (call.caller.id, call.terms.key, call.operation.name, _input(call), b"", to_micros(call.now))
    return None if tx.execute_sql(_CLAIM, row) else recall(call, tx, seal)


def recall(call: Call, tx: Transaction, seal: Seal) -> StoredAnswer | None:
    """The answer that this caller got under this key; none if the key is new."""
    if call.terms.key is None:
        return None
    row = tx.execute(_recall, {"caller": call.caller.id, "key": call.terms.key}).mappings().first()
    if row is None:
        return None
    if (row["action"], row["input"]) != (call.operation.name, _input(call)):
        raise KeyReused(f"the idempotency key {call.terms.key!r} was used for another call, {row['action']}")
    kept = seal.unseal(row["result"], context=_context(call))
    return StoredAnswer(call.operation.output.validate_json(kept))


def remember(call: Call, tx: Transaction, seal: Seal, result: Any) -> None:
    """Keep the answer under the key that was claimed."""
    if call.terms.key is None:
        return
    answer = call.operation.output.dump_json(result)
    sealed = seal.seal(answer, context=_context(call))
    tx.execute_sql(_REMEMBER, (sealed, call.caller.id, call.terms.key))


def forget(tx: Transaction, *, before: datetime) -> int:
    """Drop the keys of calls made before `before`; how many."""
    return tx.execute(delete(idempotency).where(idempotency.c.at < before)).rowcount


def hold_fence(given: int, current: int) -> None:
    """Refuse a call from a controller whose lease has passed to another."""
    if given != current:
        raise Fenced(f"this controller's lease (fence {given}) has passed to another (fence {current})")


def _input(call: Call) -> str:
    """Uploaded bytes count, and the scope: a narrower token must not get what a wider one got."""
    return f"{call.digest} {call.content} {call.caller.workspace} {call.caller.actions}"


def _context(call: Call) -> bytes:
    return f"{call.caller.id}/{call.terms.key}".encode()
