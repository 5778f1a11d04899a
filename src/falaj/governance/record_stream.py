"""Streams of a record that changes: one item for each change, and a heartbeat in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.record import Record

R = TypeVar("R", bound=Record)

POLL_S = 0.1
CONTROLLER = "controller"
"""The process that does what clients wait for."""
HEARTBEAT_S = 2.0
"""An unchanged record is repeated this often, so that a client that is gone is noticed."""


def stream_changes(
    gate: Gate, read: Callable[[Transaction], R], *, has_ended: Callable[[R], bool]
) -> Iterator[R]:
    """Yield the record that `read` returns at each change, until it has ended; each read is a transaction.

    ProcessFailed where the controller, which would change it, keeps failing.
    """
    last: R | None = None
    sent_at = 0.0
    while last is None or not has_ended(last):
        with gate.database.read() as tx:
            now = read(tx)
        if now != last or time.monotonic() - sent_at >= HEARTBEAT_S:
            if now == last:
                gate.require_running(CONTROLLER)
            sent_at = time.monotonic()
            yield now
        else:
            time.sleep(POLL_S)
        last = now
