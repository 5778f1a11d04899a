"""The shared policy epoch: a number that grows with every change that invalidates cached decisions."""

from __future__ import annotations

import time

from sqlalchemy import update

from falaj.governance.operations.call import running_call
from falaj.governance.tables import epochs
from falaj.ports.metadata import Database, Transaction

_CURRENT = "SELECT epoch FROM governance_epochs WHERE id = 1"
_advance = update(epochs).where(epochs.c.id == 1).values(epoch=epochs.c.epoch + 1)


def current_epoch(tx: Transaction) -> int:
    return int(tx.execute_sql(_CURRENT)[0][0])


def advance_epoch(tx: Transaction) -> None:
    """Make every process drop its cached decisions, tokens and keys. Cache nothing under it before the commit."""
    tx.execute(_advance)
    call = running_call()
    if call is not None:
        call.epoch_moved = True


class RecentEpoch:
    """The epoch, at most `max_age_s` old: for the hot path, which cannot query the database on each request."""

    def __init__(self, database: Database, *, max_age_s: float = 0.25) -> None:
        self._database = database
        self._max_age_s = max_age_s
        self._epoch = -1
        self._read_at = float("-inf")

    def fresh(self) -> int | None:
        """Return the epoch without I/O; none if it was read too long ago."""
        return self._epoch if time.monotonic() - self._read_at <= self._max_age_s else None

    def value(self) -> int:
        if time.monotonic() - self._read_at > self._max_age_s:
            with self._database.read() as tx:
                self._epoch = current_epoch(tx)
            self._read_at = time.monotonic()
        return self._epoch
