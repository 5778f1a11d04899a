"""Decisions a CPU second of the scheduler, as a pure function, on the shapes of Kueue's published performance runs.

Kueue's baseline: 30 queues with a quota of 20 CPUs each, and in each 350 jobs of 1 CPU, 100 of 5 and 50 of 20, with
priorities by size, lasting 0.2, 0.5 and 1 s: 15,000 workloads. It admits all of them in 351 s, 43 a second.
That figure is the peer here: published, not measured in this run, and reached through a Kubernetes API, with borrowing
between queues and with workloads that take their time, by the clock on the wall; what is measured here is the deciding
alone, in one process with one thread, in its CPU seconds, so that a busy machine does not blur it.

Two figures: `decided` counts every pending job that was given its answer, one snapshot with all of them waiting;
`admitted` counts starts only, until all have run on a virtual clock, each end of a job being followed by a new decision
about all that wait: what the published figure counts. The clock and its bookkeeping are in that time.
`--large` runs 50,000 in 1,000 queues (42 a second published) instead.
"""

from __future__ import annotations

import heapq
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count

from falaj.records.names import ObjectId
from falaj.records.scheduling import Node, Queue, Quota, Request, Resources, Running, Snapshot, Start
from falaj.scheduling import decide
from harness import Result, Rule, report, say

QUICK = True
ROUNDS = 3
GOAL = 2000
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
CPUS_A_NODE = 40


@dataclass(frozen=True)
class Shape:
    queues: int
    small: int
    medium: int
    large: int
    published: float

    @property
    def workloads(self) -> int:
        return self.queues * (self.small + self.medium + self.large)

    @property
    def words(self) -> str:
        return f"{self.workloads:,} workloads in {self.queues:,} queues"


BASELINE = Shape(queues=30, small=350, medium=100, large=50, published=43)
LARGE = Shape(queues=1000, small=35, medium=10, large=5, published=42)


def main() -> None:
    shape = LARGE if "--large" in sys.argv else BASELINE
    snapshot = waiting(shape)
    decided = shape.workloads / min(seconds_to_decide(snapshot) for _ in range(ROUNDS))
    admitted = shape.workloads / seconds_to_drain(snapshot)
    report(
        "scheduling" if shape is BASELINE else "scheduling_large",
        [
            Result(f"decided per CPU s, {shape.words}", decided, shape.published, GOAL, Rule.FALAJ_AT_LEAST),
            Result(
                f"admitted per CPU s, {shape.words}", admitted, shape.published, GOAL, Rule.FALAJ_AT_LEAST
            ),
        ],
    )


def waiting(shape: Shape) -> Snapshot:
    """Everything submitted, nothing running, and nodes for twice the sum of the quotas, so that the quotas bind."""
    numbers = count()
    sizes = [(shape.small, 1, 50, 200), (shape.medium, 5, 100, 500), (shape.large, 20, 200, 1000)]
    pending = tuple(
        Request(
            job=ObjectId(f"job-{number:06}"),
            queue=f"queue-{queue}",
            each=Resources(cpus=cpus),
            priority=priority,
            submitted_at=BEGIN + timedelta(microseconds=number),
            time_limit=timedelta(milliseconds=lasts_ms),
        )
        for queue in range(shape.queues)
        for jobs, cpus, priority, lasts_ms in sizes
        for number in (next(numbers) for _ in range(jobs))
    )
    nodes = tuple(
        Node(name=f"node-{i:04}", zone="local", jurisdiction="AE", cpus=CPUS_A_NODE, memory_bytes=2**38)
        for i in range(shape.queues)
    )
    queues = tuple(Queue(name=f"queue-{i}", quota=Quota(cpus=20)) for i in range(shape.queues))
    return Snapshot(now=BEGIN + timedelta(seconds=1), nodes=nodes, queues=queues, pending=pending)


def seconds_to_decide(snapshot: Snapshot) -> float:
    started = time.process_time()
    decide(snapshot)
    return time.process_time() - started


def seconds_to_drain(snapshot: Snapshot) -> float:
    """Decide, start, let the clock run to the next end, and again, until nobody waits."""
    began, rounds = time.process_time(), 0
    pending = {request.job: request for request in snapshot.pending}
    running: list[tuple[datetime, str, Running]] = []
    while pending:
        for decision in decide(snapshot):
            if isinstance(decision, Start):
                job = start(pending.pop(decision.job), decision, snapshot.now)
                heapq.heappush(running, (job.ends_by or snapshot.now, decision.job, job))
        now = running[0][0]
        while running and running[0][0] <= now:
            heapq.heappop(running)
        snapshot = Snapshot(
            now=now,
            nodes=snapshot.nodes,
            queues=snapshot.queues,
            pending=tuple(pending.values()),
            running=tuple(job for _, _, job in running),
        )
        rounds += 1
    taken = time.process_time() - began
    say(f"all admitted in {rounds} rounds of decisions, {taken:.1f} CPU s")
    return taken


def start(request: Request, decision: Start, now: datetime) -> Running:
    ends_by = now + (request.time_limit or timedelta(0))
    return Running(request=request, placements=decision.placements, started_at=now, ends_by=ends_by)


if __name__ == "__main__":
    main()
