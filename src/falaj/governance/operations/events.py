"""Events: stored in the transaction of the change that they report, and delivered to webhooks afterwards.

An event has the number of the audit entry of its call. Entries are numbered in the order of their commits, so whoever
has read up to one number misses nothing by going on from there.
"""

from __future__ import annotations

from typing import Any

from falaj.governance.operations.call import Call
from falaj.governance.tables import events
from falaj.records.governance.objects import StoredObject
from falaj.records.names import new_id

PREFIX = "falaj."


def announce(call: Call, event: str, *, subject: StoredObject, data: dict[str, Any]) -> None:
    """Add a further event of `call`, such as monitoring.alert; it is stored only if the call commits."""
    place = {"subject": subject.id, "workspace": subject.home}
    call.announced.append({"type": PREFIX + event, **place, "data": {"kind": subject.kind, **data}})


def emit(call: Call, seq: int) -> None:
    """Store the events of `call`, whose audit entry is `seq`: that it was performed, and those that it announced."""
    made = [new.id for new in call.created]
    subject = call.created[0] if made else call.target
    referred = [found.id for group in call.referred.values() for found in group]
    data = {
        "caller": call.caller.name,
        "kind": subject.kind,
        "name": subject.name,
        "created": made,
        "objects": referred,
    }
    data |= call.event_data
    place = {"subject": subject.id, "workspace": call.target.home}
    own = {"type": PREFIX + call.operation.name, **place, "data": data}
    emitted = [own, *call.announced] if call.operation.emits else call.announced
    for part, event in enumerate(emitted):
        call.tx.insert(events, {"id": new_id("evt"), "seq": seq, "part": part, "at": call.now, **event})
