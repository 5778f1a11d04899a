"""When a waiting job will start, if every job runs to its limit and nobody comes in between."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from falaj.records.scheduling import Decision, Running, Snapshot, Start
from falaj.scheduling.decide import decide

STEPS_AHEAD = 100


def expected_start(snapshot: Snapshot, job: str) -> datetime | None:
    """The moment, or none: it hangs on a job without a time limit, or lies more than 100 ends of jobs ahead."""
    for _ in range(STEPS_AHEAD):
        decisions = decide(snapshot)
        if any(isinstance(decision, Start) and decision.job == job for decision in decisions):
            return snapshot.now
        following = at_next_end(after(snapshot, decisions))
        if following is None:
            return None
        snapshot = following
    return None


def after(snapshot: Snapshot, decisions: Sequence[Decision]) -> Snapshot:
    """The snapshot once `decisions` are carried out."""
    places = {decision.job: decision.placements for decision in decisions if isinstance(decision, Start)}
    started = tuple(
        Running(
            request=request,
            placements=places[request.job],
            started_at=snapshot.now,
            ends_by=None if request.time_limit is None else snapshot.now + request.time_limit,
        )
        for request in snapshot.pending
        if request.job in places
    )
    waiting = tuple(request for request in snapshot.pending if request.job not in places)
    return snapshot.model_copy(update={"pending": waiting, "running": snapshot.running + started})


def at_next_end(snapshot: Snapshot) -> Snapshot | None:
    """The snapshot when the next job ends by its limit; none if no end is known. One that is late ends any moment."""
    ends = [running.ends_by for running in snapshot.running if running.ends_by is not None]
    if not ends:
        return None
    now = max(min(ends), snapshot.now)
    left = tuple(running for running in snapshot.running if running.ends_by is None or running.ends_by > now)
    return snapshot.model_copy(update={"now": now, "running": left})
