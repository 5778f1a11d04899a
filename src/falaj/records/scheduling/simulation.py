"""The queue on a virtual clock: what is replayed, in which world, under which assumptions, and what came of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from falaj.records.names import Name, ObjectId
from falaj.records.record import Record
from falaj.records.scheduling.snapshot import Budget, Count, Node, Part, Price, Queue, Reason, Request

LengthOfTime = Annotated[timedelta, Field(ge=timedelta(0), le=timedelta(days=3650))]
NO_TIME = timedelta(0)


# -------------------------------------------------------------------------------------------- what is replayed


class PastJob(Record):
    """A job, and how long it computes when nobody disturbs it: known to the simulator, never to the scheduler.

    `waited` and `evictions` are what really happened to it, where that is known.
    """

    request: Request
    duration: LengthOfTime
    waited: LengthOfTime | None = None
    evictions: Count = 0


class Outage(Record):
    """A node that is lost at one moment and back at another (none: never); its jobs go on from their checkpoints."""

    node: Name
    lost_at: AwareDatetime
    back_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _back_after_loss(self) -> Outage:
        if self.back_at is not None and self.back_at <= self.lost_at:
            raise ValueError(f"node {self.node} is back at {self.back_at}, which is not after its loss")
        return self


class Assumptions(Record):
    """Assumptions of the simulator where the records of past jobs do not tell.

    An evicted job holds its place for `grace` and computes nothing in it. It goes on later from its last checkpoint:
    one is saved every `checkpoint_every` of an attempt, and zero means that nothing is lost, since it saves one when
    it is told to go. A queue's history halves in `half_life`. Decisions are at least `decide_every` apart.
    """

    grace: LengthOfTime = timedelta(minutes=1)
    checkpoint_every: LengthOfTime = NO_TIME
    half_life: Annotated[timedelta, Field(gt=NO_TIME, le=timedelta(days=3650))] = timedelta(days=7)
    decide_every: LengthOfTime = NO_TIME


class SimulatedCluster(Record):
    """The machines, the queues and the prices in which jobs are replayed. Budgets are what is left at the beginning."""

    nodes: tuple[Node, ...]
    queues: tuple[Queue, ...]
    budgets: tuple[Budget, ...] = ()
    price: Price = Price()
    outages: tuple[Outage, ...] = ()
    assume: Assumptions = Assumptions()


# ------------------------------------------------------------------------------------------- what may be changed


class ResourceBound(Record):
    """A quota's or a limit's new figure for one resource of one queue; none: no bound."""

    queue: Name
    resource: Literal["cpus", "gpus", "memory_bytes"]
    amount: Count | None


class NewWeight(Record):
    """A queue's new weight."""

    queue: Name
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]


class MoreNodes(Record):
    """Further nodes, each like an existing one, or with other GPUs."""

    like: Name
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    gpu_model: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class Changes(Record):
    """The changes of a what-if."""

    quotas: tuple[ResourceBound, ...] = ()
    limits: tuple[ResourceBound, ...] = ()
    weights: tuple[NewWeight, ...] = ()
    add_nodes: tuple[MoreNodes, ...] = ()
    remove_nodes: tuple[Name, ...] = ()


class WhatIfQuestion(Record):
    """A what-if: the jobs submitted from `since` to `until`, as accounted at `asked_at`, in this cluster."""

    world: SimulatedCluster
    changes: Changes = Changes()
    since: AwareDatetime
    until: AwareDatetime
    asked_at: AwareDatetime


# -------------------------------------------------------------------------------------------------- what came of it


class JobOutcome(Record):
    """The outcome of one job. `wait` is the time to its first start, `ran` the time for which it held resources.

    `evicted` counts preemptions, `displaced` lost nodes; `lost` is computing that had to be done again. One that is
    still `waiting` when nothing more can happen says why.
    """

    job: ObjectId
    queue: Name
    submitted_at: AwareDatetime
    started_at: AwareDatetime | None = None
    ended_at: AwareDatetime | None = None
    end: Literal["done", "timed-out", "waiting"]
    wait: LengthOfTime | None = None
    ran: LengthOfTime = NO_TIME
    evicted: Count = 0
    displaced: Count = 0
    lost: LengthOfTime = NO_TIME
    gpu_hours: Part = 0.0
    cpu_hours: Part = 0.0
    cost: Part = 0.0
    reason: Reason | None = None


class WaitTimes(Record):
    """Over the jobs that started; all zero where none did."""

    mean: LengthOfTime = NO_TIME
    median: LengthOfTime = NO_TIME
    p95: LengthOfTime = NO_TIME


class SimulationFigures(Record):
    """The sums of a team, or of all.

    `slowdown` is the mean over ended jobs of (end - submission) / (what it computed, at least 10 s), never below 1.
    `gpu_use` and `cpu_use` are shares of all GPUs and CPUs, from the first submission to the last end.
    """

    jobs: Count
    ended: Count
    timed_out: Count = 0
    never_started: Count = 0
    wait: WaitTimes = WaitTimes()
    slowdown: Part = 0.0
    preemptions: Count = 0
    lost: LengthOfTime = NO_TIME
    gpu_hours: Part = 0.0
    cpu_hours: Part = 0.0
    cost: Part = 0.0
    gpu_use: Part = 0.0
    cpu_use: Part = 0.0


class QueueFairness(Record):
    """The share that a queue held while jobs of it waited, beside its entitlement, both averaged over that time.

    The entitlement of a moment divides the whole by weight, down the tree, among those who want something then; who
    wants less than that leaves the rest to the others. Quotas and limits are not in it. `short` is the average of what
    was missing, moments with too much not being set off against it.
    """

    queue: Name
    backlogged: LengthOfTime
    entitled: Part
    held: Part
    short: Part


class Fairness(Record):
    """`jain` is Jain's index over held / entitled of the queues that ever waited: 1 is even, 1/n is one has all.

    `largest_deviation` is the largest `short` of any queue.
    """

    jain: Annotated[float, Field(ge=0, le=1.000001)] = 1.0
    largest_deviation: Part = 0.0
    queues: tuple[QueueFairness, ...] = ()


class TeamFigures(Record):
    queue: Name
    figures: SimulationFigures


class SimulationResult(Record):
    """The result of a replay."""

    began: AwareDatetime
    ended: AwareDatetime
    jobs: tuple[JobOutcome, ...]
    teams: tuple[TeamFigures, ...]
    total: SimulationFigures
    fairness: Fairness
    decisions: Count = 0


# ------------------------------------------------------------------------------------------------- what is compared


class ObservedFigures(Record):
    """What really happened, beside the replay without changes: the accuracy of the replay."""

    jobs: Count
    wait: WaitTimes
    simulated_wait: WaitTimes
    preemptions: Count
    simulated_preemptions: Count


class TeamComparison(Record):
    queue: Name
    before: SimulationFigures
    after: SimulationFigures


class WhatIfComparison(Record):
    """Two replays of the same jobs, with one difference: the changes. `words` says what the reader must know of it."""

    since: AwareDatetime
    until: AwareDatetime
    jobs: Count
    changes: tuple[str, ...]
    teams: tuple[TeamComparison, ...]
    before: SimulationFigures
    after: SimulationFigures
    fairness_before: Fairness
    fairness_after: Fairness
    observed: ObservedFigures | None = None
    words: tuple[str, ...] = ()


class WhatIfReceipt(Record):
    """Work whose comparison is kept: queues.what_if_result reads it."""

    work: ObjectId
    jobs: Count
