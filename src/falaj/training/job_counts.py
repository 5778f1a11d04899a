"""Figures and names of jobs, for the room that keeps the accounts."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import func, select

from falaj.ports.metadata import Transaction
from falaj.records.training.jobs import JobState
from falaj.training import store
from falaj.training.tables import jobs

SLICE = 900
"""Values per IN list: under every database's limit."""

_unfinished = (
    select(jobs.c.queue, jobs.c.state, func.count())
    .where(jobs.c.state.in_([JobState.QUEUED, JobState.RUNNING]))
    .group_by(jobs.c.queue, jobs.c.state)
)


def unfinished_in_queues(tx: Transaction) -> dict[str, tuple[int, int]]:
    """For each queue that has any, how many jobs run and how many wait in it."""
    found: dict[str, tuple[int, int]] = {}
    for queue, state, count in tx.execute(_unfinished):
        running, waiting = found.get(queue, (0, 0))
        found[queue] = (count, waiting) if state == JobState.RUNNING else (running, count)
    return found


def queue_changed(tx: Transaction) -> None:
    """Tell whoever waits for it that jobs may start which could not."""
    store.record_queue_change(tx)


def names_of_jobs(tx: Transaction, idents: Iterable[str]) -> dict[str, str]:
    """What jobs were called by who submitted them."""
    wanted = sorted(set(idents))
    found: dict[str, str] = {}
    for start in range(0, len(wanted), SLICE):
        part = wanted[start : start + SLICE]
        rows = tx.execute(select(jobs.c.id, jobs.c.spec).where(jobs.c.id.in_(part)))
        found |= {ident: spec["name"] for ident, spec in rows}
    return found
