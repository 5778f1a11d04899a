"""Events, written with the change that they tell of; the bus delivers them afterwards."""

from __future__ import annotations

from sqlalchemy import insert

from falaj.governance.call import Call
from falaj.governance.tables import outbox
from falaj.records.names import new_id

_insert = insert(outbox)


def emit(call: Call) -> None:
    """The event that `call` was done."""
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
