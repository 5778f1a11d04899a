"""Who starts now, who waits and who makes room: a pure function of a snapshot.

- The queues take turns, those whose next job stays within its quotas before those whose next job borrows, then by
  fair share: down the tree, at each level the branch that holds and has held the least for its weight. In a queue the
  order is priority, then submission. Who has a claim, since others were evicted for it, goes before all.
- A job in its turn starts if the limits of its queue and of all above it, its workspace's budget, and the free nodes
  that its residency label and its affinity permit hold all its replicas.
- The first job that waits for nodes is the head. A place is kept for it: the one that is free first when running jobs
  end by their limits. A later job starts only beside that place, or on it if its time limit ends before the head's
  moment comes. Where that moment is unknown, since it hangs on a job without a limit, the place is the one that the
  jobs that run longest leave, and others start only beside it. For a job that borrows no place is kept that others hold
  within their quotas and take again at once, since jobs of theirs wait.
- The first job that waits for the quota of a queue, or of one above it, keeps that quota. Later jobs there start only
  beside it; other queues go on.
- A job that waits may evict others, by the rules of docs/decisions/0012. What they leave is promised to it.

A job that can never start, since it is too large or its data may lie on no node, holds nobody up.
"""

from __future__ import annotations

from collections.abc import Iterable

from falaj.records.scheduling.snapshot import Decision, Reason, Request, Snapshot, Wait
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import Rank, rank
from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.scheduling_round import SchedulingRound


def decide(snapshot: Snapshot) -> tuple[Decision, ...]:
    """A start or a wait for each pending job, in the order in which they had their turn; before a wait, evictions."""
    return tuple(all_decisions(SchedulingRound(snapshot).decide_all()))


def decide_from(
    backlog: Backlog, snapshot: Snapshot, *, cluster: Cluster | None = None
) -> tuple[Decision, ...]:
    """The starts and evictions that `decide` finds for a snapshot in which the jobs of `backlog` are pending.

    What is in `snapshot.pending` is not looked at, and most waits are left out: so a round costs about as much as it
    starts jobs, however many wait. `cluster` is made of the snapshot's nodes; it can be kept while they do not change.
    """
    scheduling_round = SchedulingRound(snapshot, backlog, cluster).decide_all()
    return tuple([decision for turn in scheduling_round.taken for decision in turn.decisions])


def in_order(pending: Iterable[Request]) -> list[Request]:
    """By rank: the order within one queue."""
    return sorted(pending, key=rank)


def all_decisions(scheduling_round: SchedulingRound) -> list[Decision]:
    """Who was passed over, since a job like it was refused, stands where its queue passed it."""
    found: list[Decision] = []
    lines = {queue: passed_over(scheduling_round, queue) for queue in scheduling_round.job_groups}
    for turn in scheduling_round.taken:
        waiting = lines.get(turn.queue, [])
        while waiting and (turn.rank is None or waiting[-1][0] < turn.rank):
            found.append(waiting.pop()[1])
        found.extend(turn.decisions)
    for queue in sorted(scheduling_round.backlog.queues.keys() - scheduling_round.job_groups.keys()):
        found += [
            Wait(job=each.job, reason=Reason.NO_QUEUE) for _, each in scheduling_round.backlog.in_order(queue)
        ]
    return found


def passed_over(scheduling_round: SchedulingRound, queue: str) -> list[tuple[Rank, Wait]]:
    """The last first."""
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
