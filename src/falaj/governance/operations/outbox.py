"""The outbox: events are stored in the transaction of the change that they report, and delivered afterwards."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert

from falaj.governance.operations.call import Call
from falaj.governance.tables import outbox
from falaj.ports.metadata import Transaction
from falaj.records.names import new_id

_insert = insert(outbox)


def forget(tx: Transaction, *, before: datetime) -> int:
    """Delete events that are older than `before`, delivered or not; return how many."""
    return tx.execute(delete(outbox).where(outbox.c.at < before)).rowcount


def emit(call: Call) -> None:
    """Store the event that `call` was performed."""
    made = [new.id for new in call.created]
    call.tx.execute(
        _insert,
        {
            "id": new_id("evt"),
            "type": f"falaj.{call.operation.name}",
            "subject": made[0] if made else call.target.id,
            "data": {"caller": call.caller.name, "created": made},
            "at": call.now,
            "delivered": False,
        },
    )


def announce(call: Call, event: str, *, subject: str, data: dict[str, Any]) -> None:
    """Store a further event of `call`, such as monitoring.alert; it is delivered only if the call commits."""
    row = {"id": new_id("evt"), "type": f"falaj.{event}", "subject": subject, "data": data, "at": call.now}
    call.tx.execute(_insert, row | {"delivered": False})
