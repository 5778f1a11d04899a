"""When a waiting job will start, if every job runs to its limit and nobody comes in between."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from falaj.records.scheduling.snapshot import Decision, Evict, Request, RunningJob, Snapshot, Start
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.decide import decide_from

STEPS_AHEAD = 100
STARTS_AHEAD = 2_000


def expected_start(snapshot: Snapshot, job: str) -> datetime | None:
    """The moment, or none: it hangs on a job without a time limit, or lies more than 100 ends of jobs ahead.

    Who is told to make room is taken to leave at once. After 2,000 starts of others it is not looked for any more.
    """
    backlog, cluster = Backlog(snapshot.pending), Cluster(snapshot.nodes, snapshot.running)
    snapshot, starts = without_leaving(snapshot, backlog), 0
    asked: dict[str, Request] = {request.job: request for request in backlog}
    for _ in range(STEPS_AHEAD):
        decisions = decide_from(backlog, snapshot, cluster=cluster)
        if any(isinstance(decision, Start) and decision.job == job for decision in decisions):
            return snapshot.now
        starts += sum(isinstance(decision, Start) for decision in decisions)
        evicts = any(isinstance(decision, Evict) for decision in decisions)
        carried_out = after(snapshot, decisions, backlog, asked)
        following = carried_out if evicts else at_next_end(carried_out)
        if following is None or starts > STARTS_AHEAD:
            return None
        snapshot = following
    return None


def without_leaving(snapshot: Snapshot, backlog: Backlog) -> Snapshot:
    """Those that were told to leave are back in their queues."""
    for running in snapshot.running:
        if running.leaving:
            backlog.add(running.request.model_copy(update={"claim": False}))
    left = tuple(running for running in snapshot.running if not running.leaving)
    return snapshot.model_copy(update={"running": left})


def after(
    snapshot: Snapshot, decisions: Sequence[Decision], backlog: Backlog, asked: dict[str, Request]
) -> Snapshot:
    """The snapshot once `decisions` are carried out; the backlog, and who asks in it, are brought to that state."""
    evicted = {decision.job for decision in decisions if isinstance(decision, Evict)}
    started = []
    for decision in decisions:
        if isinstance(decision, Start):
            request = asked.pop(decision.job)
            backlog.remove(request)
            started.append(running_from(request.model_copy(update={"claim": False}), decision, snapshot.now))
    for job in {decision.by for decision in decisions if isinstance(decision, Evict)}:
        backlog.remove(asked[job])
        asked[job] = asked[job].model_copy(update={"claim": True})
        backlog.add(asked[job])
    staying = []
    for running in snapshot.running:
        if running.request.job in evicted:
            asked[running.request.job] = running.request
            backlog.add(running.request)
        else:
            staying.append(running)
    return snapshot.model_copy(update={"running": (*staying, *started)})


def running_from(request: Request, start: Start, now: datetime) -> RunningJob:
    return RunningJob(
        request=request,
        placements=start.placements,
        started_at=now,
        ends_by=None if request.time_limit is None else now + request.time_limit,
        borrows=start.borrows,
    )


def at_next_end(snapshot: Snapshot) -> Snapshot | None:
    """The snapshot when the next job ends by its limit; none if no end is known. One that is late ends any moment."""
    ends = [running.ends_by for running in snapshot.running if running.ends_by is not None]
    if not ends:
        return None
    now = max(min(ends), snapshot.now)
    left = tuple(running for running in snapshot.running if running.ends_by is None or running.ends_by > now)
    return snapshot.model_copy(update={"now": now, "running": left})
