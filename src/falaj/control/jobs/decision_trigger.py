"""When the queue is worth a decision: a queue in which nothing happens costs nothing, however long it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from falaj.records.scheduling.snapshot import Node
from falaj.training.queue import QueueSnapshot, is_due

RECONSIDER_S = 5.0
"""So often a queue is looked at anew in which jobs wait: shares decay, and budgets and quotas are set by people."""
QUICK_S = 0.05
"""A decision that took longer is followed by a pause as long: under constant change, half of the time is left to
everything else."""


class DecisionTrigger:
    """Remembers what the last decision saw."""

    def __init__(self) -> None:
        self._changes = -1
        self._nodes: tuple[Node, ...] = ()
        self._next_due: datetime | None = None
        self._waits = False
        self._rests_until = self._decided_at = float("-inf")

    def has_come(self, changes: int, nodes: Sequence[Node], *, now: datetime) -> bool:
        """Whether to decide, with so many `changes` of the queue and these `nodes`."""
        moment = time.monotonic()
        if moment < self._rests_until:
            return False
        if changes != self._changes or tuple(nodes) != self._nodes:
            return True
        if self._next_due is not None and is_due(self._next_due, now=now):
            return True
        return self._waits and moment - self._decided_at >= RECONSIDER_S

    def decided(
        self, changes: int, nodes: Sequence[Node], look: QueueSnapshot, *, waits: bool, took_s: float
    ) -> None:
        """A decision was made on `look`, which is at least as new as `changes`; whether anybody still `waits`."""
        self._changes, self._nodes, self._next_due = changes, tuple(nodes), look.next_due
        self._waits = waits
        self._decided_at = time.monotonic()
        self._rests_until = self._decided_at + (took_s if took_s > QUICK_S else 0.0)
