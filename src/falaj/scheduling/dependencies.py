"""The protocol by which queues and usage read from the jobs service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from falaj.ports.metadata import Transaction


class JobFigures(Protocol):
    """Job counts and names, and notice of changed queues."""

    def unfinished_in_queues(self, tx: Transaction) -> dict[str, tuple[int, int]]:
        """Return the number of running and of waiting jobs of each queue that has any."""
        ...

    def queue_changed(self, tx: Transaction) -> None:
        """Record that a queue or budget has changed, so that waiting jobs may start."""
        ...

    def names_of_jobs(self, tx: Transaction, idents: Iterable[str]) -> dict[str, str]:
        """Return the names of jobs by id."""
        ...
