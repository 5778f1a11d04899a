"""What an import did: the counts of the source and of what is stored, and what was left behind."""

from __future__ import annotations

from typing import NamedTuple

from falaj.records.record import Record


class ImportCount(Record):
    """How many of one kind the source has, and how many of those are stored."""

    what: str
    source: int
    here: int


class ImportReport(Record):
    """The result of an import; it is complete if everything that the source has is stored, once."""

    source: str
    kind: str
    complete: bool
    new_runs: int
    changed_runs: int
    """Runs that were there, and lacked something."""
    counts: tuple[ImportCount, ...]
    problems: tuple[str, ...] = ()
    """What was refused, by run: the first of them."""
    notes: tuple[str, ...] = ()
    """What the source has and an import leaves behind, or stores under another name."""


class RunCounts(NamedTuple):
    """What a run consists of."""

    params: int = 0
    tags: int = 0
    points: int = 0
    datasets: int = 0
    artifacts: int = 0
    artifact_bytes: int = 0

    def plus(self, other: RunCounts) -> RunCounts:
        return RunCounts(*(own + more for own, more in zip(self, other, strict=True)))

    def within(self, other: RunCounts) -> RunCounts:
        """Return how much of it counts for `other`: what users have added since is no part of the import."""
        return RunCounts(*(min(own, most) for own, most in zip(self, other, strict=True)))
