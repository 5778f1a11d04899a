"""Decisions per CPU second of the scheduler as a pure function, on the workloads of Kueue's published performance runs.

Kueue's baseline has 30 queues of 20 CPUs in cohorts that lend up to 120 CPUs, with 15,000 jobs of 1, 5 and 20 CPUs that
last 0.2 to 1 s: it admits 43 a second; of 50,000 in 1,000 queues, 42. These published figures include a Kubernetes API
and wall-clock time; here only deciding is measured, in CPU seconds of one thread. It shows that deciding is not the
bottleneck, not that Falaj would start that many pods.

`admitted` counts starts until all jobs have run on a virtual clock, with a round after each end. `decided` counts jobs
decided from one snapshot with all of them waiting. `memory` is the peak of one `decide` per workload.

Cohorts are parents whose quota is the sum of their queues', with nodes for twice that. Unlike in the published runs,
one queue in three submits its jobs to the next, so that there is something to borrow.
"""

from __future__ import annotations

import heapq
import time
import tracemalloc
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count

from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import (
    Evict,
    Node,
    Queue,
    Quota,
    Request,
    Resources,
    RunningJob,
    Snapshot,
    Start,
)
from falaj.scheduling import Backlog, decide, decide_from
from falaj.scheduling.capacity.cluster import Cluster
from harness import Result, Rule, report, say

QUICK = True
ROUNDS = 3
GOAL = 2000
GROWTH = 1.5
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
CPUS_A_NODE, CPUS_A_QUEUE, BORROWED_AT_MOST = 40, 20, 100


@dataclass(frozen=True)
class Shape:
    name: str
    cohorts: int
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


BASELINE = Shape("scheduler", 5, queues=30, small=350, medium=100, large=50, published=43)
LARGE = Shape("scheduler_large", 10, queues=1000, small=35, medium=10, large=5, published=42)


def main() -> None:
    memory = {shape.name: bytes_to_decide(waiting(shape)) / shape.workloads for shape in (BASELINE, LARGE)}
    say(", ".join(f"{name}: {size:,.0f} bytes a workload" for name, size in memory.items()))
    for shape in (BASELINE, LARGE):
        snapshot = waiting(shape)
        decided = shape.workloads / min(seconds_to_decide(snapshot) for _ in range(ROUNDS))
        admitted = shape.workloads / seconds_to_drain(snapshot)
        at_least = shape.published, GOAL, Rule.FALAJ_AT_LEAST
        results = [
            Result(f"admitted per CPU s, {shape.words}", admitted, *at_least),
            Result(f"decided per CPU s, {shape.words}", decided, *at_least),
        ]
        if shape is LARGE:
            what = "bytes a workload to decide, against those at 15,000 workloads"
            results.append(Result(what, memory[LARGE.name], memory[BASELINE.name], GROWTH))
        report(shape.name, results)


def waiting(shape: Shape) -> Snapshot:
    """Return a snapshot with all jobs pending and none running."""
    numbers = count()
    sizes = [(shape.small, 1, 50, 200), (shape.medium, 5, 100, 500), (shape.large, 20, 200, 1000)]
    pending = tuple(
        Request(
            job=ObjectId(f"job-{number:06}"),
            queue=f"queue-{queue - (queue % 3 == 2)}",
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
    return Snapshot(now=BEGIN + timedelta(seconds=1), nodes=nodes, queues=queues_of(shape), pending=pending)


def queues_of(shape: Shape) -> tuple[Queue, ...]:
    own, most = Quota(cpus=CPUS_A_QUEUE), Quota(cpus=CPUS_A_QUEUE + BORROWED_AT_MOST)
    together = Quota(cpus=CPUS_A_QUEUE * shape.queues // shape.cohorts)
    cohorts = [Queue(name=f"cohort-{i}", quota=together) for i in range(shape.cohorts)]
    queues = [
        Queue(name=f"queue-{i}", quota=own, limit=most, parent=f"cohort-{i % shape.cohorts}")
        for i in range(shape.queues)
    ]
    return (*cohorts, *queues)


def seconds_to_decide(snapshot: Snapshot) -> float:
    started = time.process_time()
    decide(snapshot)
    return time.process_time() - started


def bytes_to_decide(snapshot: Snapshot) -> int:
    tracemalloc.start()
    decide(snapshot)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


class Clock:
    """A virtual clock with waiting and running jobs. Preempted jobs stop at once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.now = snapshot, snapshot.now
        self.pending = {request.job: request for request in snapshot.pending}
        self.running: dict[str, RunningJob] = {}
        self.ends: list[tuple[datetime, str]] = []
        self.backlog, self.cluster = Backlog(snapshot.pending), Cluster(snapshot.nodes)
        self.borrowed = self.evicted = 0

    def decide(self) -> None:
        current = Snapshot(
            now=self.now,
            nodes=self.snapshot.nodes,
            queues=self.snapshot.queues,
            running=tuple(self.running.values()),
        )
        for decision in decide_from(self.backlog, current, cluster=self.cluster):
            if isinstance(decision, Start):
                self._start(decision)
            elif isinstance(decision, Evict):
                self._evict(decision)

    def go_on(self) -> None:
        """Advance to the next end of a job."""
        while self.ends[0][1] not in self.running or self.running[self.ends[0][1]].ends_by != self.ends[0][0]:
            heapq.heappop(self.ends)  # it was evicted
        self.now = self.ends[0][0]
        while self.ends and self.ends[0][0] <= self.now:
            _, job = heapq.heappop(self.ends)
            ended = self.running.get(job)
            if ended is not None and ended.ends_by == self.now:
                del self.running[job]

    def _start(self, decision: Start) -> None:
        request = self.pending.pop(decision.job)
        self.backlog.remove(request)
        job = start(request, decision, self.now)
        self.running[decision.job] = job
        self.borrowed += decision.borrows
        heapq.heappush(self.ends, (job.ends_by or self.now, decision.job))

    def _evict(self, decision: Evict) -> None:
        self.evicted += 1
        self._wait(self.running.pop(decision.job).request)
        waits = self.pending[decision.by]
        if not waits.claim:
            self.backlog.remove(waits)
            self._wait(waits.model_copy(update={"claim": True}))

    def _wait(self, request: Request) -> None:
        self.pending[request.job] = request
        self.backlog.add(request)


def seconds_to_drain(snapshot: Snapshot) -> float:
    """Decide, start and advance to the next end of a job until none waits."""
    began, rounds = time.process_time(), 0
    clock = Clock(snapshot)
    while clock.pending:
        evicted = clock.evicted
        clock.decide()
        if clock.evicted == evicted:
            clock.go_on()
        rounds += 1
    taken = time.process_time() - began
    say(
        f"all admitted in {rounds} rounds of decisions, {clock.borrowed:,} by borrowing, "
        f"{clock.evicted:,} evicted on the way, {taken:.1f} CPU s"
    )
    return taken


def start(request: Request, decision: Start, now: datetime) -> RunningJob:
    ends_by = now + (request.time_limit or timedelta(0))
    return RunningJob(
        request=request.model_copy(update={"claim": False}) if request.claim else request,
        placements=decision.placements,
        started_at=now,
        ends_by=ends_by,
        borrows=decision.borrows,
    )


if __name__ == "__main__":
    main()
