"""Idempotency keys: the answer of a write is stored under its key, encrypted, in the transaction of the write."""

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
    """Encrypts values that are stored in the metadata database."""

    def seal(self, data: bytes, *, context: bytes) -> bytes: ...

    def unseal(self, sealed: bytes, *, context: bytes) -> bytes: ...


class StoredAnswer(NamedTuple):
    value: Any


def claim(call: Call, tx: Transaction, seal: Seal) -> StoredAnswer | None:
    """Claim the key for this call, or return the answer that was stored under it.

    Taken first, so that a second call with the same key at the same time waits for the first and then repeats it.
    """
    if call.terms.key is None:
        return None
    row = (call.caller.id, call.terms.key, call.operation.name, _input(call), b"", to_micros(call.now))
    return None if tx.execute_sql(_CLAIM, row) else recall(call, tx, seal)


def recall(call: Call, tx: Transaction, seal: Seal) -> StoredAnswer | None:
    """Return the answer that this caller got under this key; none if the key is new."""
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
    """Store the answer under the key that was claimed."""
    if call.terms.key is None:
        return
    answer = call.operation.output.dump_json(result)
    sealed = seal.seal(answer, context=_context(call))
    tx.execute_sql(_REMEMBER, (sealed, call.caller.id, call.terms.key))


def forget(tx: Transaction, *, before: datetime) -> int:
    """Delete the keys of calls made before `before`; return how many."""
    return tx.execute(delete(idempotency).where(idempotency.c.at < before)).rowcount


def hold_fence(given: int, current: int) -> None:
    """Raise Fenced for a call from a controller whose lease has passed to another."""
    if given != current:
        raise Fenced(f"this controller's lease (fence {given}) has passed to another (fence {current})")


def _input(call: Call) -> str:
    """Return the identity of an input; it includes the scope: a narrower token must not get what a wider one got."""
    return f"{call.digest} {call.content} {call.caller.workspace} {call.caller.actions}"


def _context(call: Call) -> bytes:
    return f"{call.caller.id}/{call.terms.key}".encode()
