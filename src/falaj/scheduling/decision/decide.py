"""Which jobs start now, which wait and which are preempted: a pure function of a snapshot.

- Order: queues whose next job is within quota go before queues whose next job borrows, then by fair share: down the
  tree, at each level the queue with the lowest share and history for its weight. Within a queue the order is priority,
  then submission. Jobs with a preemption claim, for which others were evicted, go first.
- Admission: a job starts if the limits of its queue and of all above it, its workspace's budget, and the free nodes
  that its residency label and affinity permit hold all its replicas.
- Backfill: the first job that waits for nodes is the head. It gets a reservation: the placement that is free first when
  running jobs reach their time limits. A later job starts only beside it, or on it if its own time limit ends before
  the reservation begins. If that time is unknown, because of a job without a time limit, the reservation is what the
  longest-running jobs leave, and others start only beside it. A borrowing job gets no reservation on nodes that
  other queues hold within quota and whose waiting jobs would take them again at once.
- Quota: the first job that waits for the quota of a queue, or of one above it, reserves that quota. Later jobs there
  use only the rest; other queues are not affected.
- Preemption: a waiting job may evict others by the rules of docs/decisions/0012. What they free is nominated for it.

A job that can never start, because it is too large or its data may be stored on no node, delays no other job.
"""

from __future__ import annotations

from collections.abc import Iterable

from falaj.records.scheduling.snapshot import Decision, Reason, Request, Snapshot, Wait
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import Rank, rank
from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.scheduling_round import SchedulingRound


def decide(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Return a start or a wait for each pending job, in the order of decision, with evictions before the wait."""
    return tuple(all_decisions(SchedulingRound(snapshot).decide_all()))


def decide_from(
    backlog: Backlog, snapshot: Snapshot, *, cluster: Cluster | None = None
) -> tuple[Decision, ...]:
    """Return the starts and evictions of `decide` for a snapshot in which the jobs of `backlog` are pending.

    `snapshot.pending` is ignored, and most waits are left out, so the cost of a round depends on the jobs that start
    and not on those that wait. `cluster` is built from the snapshot's nodes; it can be reused while they do not change.
    """
    scheduling_round = SchedulingRound(snapshot, backlog, cluster).decide_all()
    return tuple([decision for turn in scheduling_round.taken for decision in turn.decisions])


def in_order(pending: Iterable[Request]) -> list[Request]:
    """Return the jobs sorted by rank, the order within one queue."""
    return sorted(pending, key=rank)


def all_decisions(scheduling_round: SchedulingRound) -> list[Decision]:
    """Return all decisions, with the waits of jobs that were skipped because one of the same shape was refused."""
    found: list[Decision] = []
    skipped = {queue: skipped_jobs(scheduling_round, queue) for queue in scheduling_round.job_groups}
    for turn in scheduling_round.taken:
        waiting = skipped.get(turn.queue, [])
        while waiting and (turn.rank is None or waiting[-1][0] < turn.rank):
            found.append(waiting.pop()[1])
        found.extend(turn.decisions)
    for queue in sorted(scheduling_round.backlog.queues.keys() - scheduling_round.job_groups.keys()):
        found += [
            Wait(job=each.job, reason=Reason.NO_QUEUE) for _, each in scheduling_round.backlog.in_order(queue)
        ]
    return found


def skipped_jobs(scheduling_round: SchedulingRound, queue: str) -> list[tuple[Rank, Wait]]:
    """Return the waits of the skipped jobs of a queue, the last first."""
    return sorted(
        (
            (rank, Wait(job=request.job, reason=job_group.refused))
            for job_group in scheduling_round.job_groups[queue]
            if job_group.refused
            for rank, request in job_group.group[job_group.done :]
        ),
        key=lambda entry: entry[0],
        reverse=True,
    )
