"""When a waiting job will start, if every job runs to its time limit and no other job is submitted."""

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
    """Return when the job starts, or None if that depends on a job without a time limit.

    Preemption victims are assumed to stop at once. The forecast gives up, with None, after 100 steps from one end of a
    job to the next, or 2,000 starts of other jobs.
    """
    backlog, cluster = Backlog(snapshot.pending), Cluster(snapshot.nodes, snapshot.running)
    snapshot, starts = without_leaving(snapshot, backlog), 0
    requests: dict[str, Request] = {request.job: request for request in backlog}
    for _ in range(STEPS_AHEAD):
        decisions = decide_from(backlog, snapshot, cluster=cluster)
        if any(isinstance(decision, Start) and decision.job == job for decision in decisions):
            return snapshot.now
        starts += sum(isinstance(decision, Start) for decision in decisions)
        evicts = any(isinstance(decision, Evict) for decision in decisions)
        carried_out = after(snapshot, decisions, backlog, requests)
        following = carried_out if evicts else at_next_end(carried_out)
        if following is None or starts > STARTS_AHEAD:
            return None
        snapshot = following
    return None


def without_leaving(snapshot: Snapshot, backlog: Backlog) -> Snapshot:
    """Return the snapshot with the jobs that are being preempted back in their queues."""
    for running in snapshot.running:
        if running.leaving:
            backlog.add(running.request.model_copy(update={"claim": False}))
    left = tuple(running for running in snapshot.running if not running.leaving)
    return snapshot.model_copy(update={"running": left})


def after(
    snapshot: Snapshot, decisions: Sequence[Decision], backlog: Backlog, requests: dict[str, Request]
) -> Snapshot:
    """Return the snapshot after `decisions`; update the backlog and its `requests` to match."""
    evicted = {decision.job for decision in decisions if isinstance(decision, Evict)}
    started = []
    for decision in decisions:
        if isinstance(decision, Start):
            request = requests.pop(decision.job)
            backlog.remove(request)
            started.append(running_from(request.model_copy(update={"claim": False}), decision, snapshot.now))
    for job in {decision.by for decision in decisions if isinstance(decision, Evict)}:
        backlog.remove(requests[job])
        requests[job] = requests[job].model_copy(update={"claim": True})
        backlog.add(requests[job])
    staying = []
    for running in snapshot.running:
        if running.request.job in evicted:
            requests[running.request.job] = running.request
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
    """Return the snapshot when the next job reaches its time limit; None if no running job has one.

    A job past its limit ends now.
    """
    ends = [running.ends_by for running in snapshot.running if running.ends_by is not None]
    if not ends:
        return None
    now = max(min(ends), snapshot.now)
    left = tuple(running for running in snapshot.running if running.ends_by is None or running.ends_by > now)
    return snapshot.model_copy(update={"now": now, "running": left})
