"""What the rooms of queues and usage ask of the room of jobs; assembly hands it in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from falaj.ports.metadata import Transaction


class JobFigures(Protocol):
    """What is known of jobs beside the accounts."""

    def unfinished_in_queues(self, tx: Transaction) -> dict[str, tuple[int, int]]:
        """For each queue that has any, how many jobs run and how many wait in it."""
        ...

    def queue_changed(self, tx: Transaction) -> None:
        """Tell whoever waits for it that jobs may start which could not."""
        ...

    def names_of_jobs(self, tx: Transaction, idents: Iterable[str]) -> dict[str, str]:
        """What jobs were called by who submitted them."""
        ...
