"""The queue: what machines offer, what jobs ask for, and what is decided about them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import Jurisdiction, Name, ObjectId
from falaj.records.record import Record

Count = Annotated[int, Field(ge=0, le=2**53)]
AtLeastOne = Annotated[int, Field(ge=1, le=1_000_000)]

Profile = Annotated[str, Field(min_length=1, max_length=64)]
Part = Annotated[float, Field(ge=0, allow_inf_nan=False)]

HIGHEST_PRIORITY = 1_000_000
PRIORITIES = {"low": -1000, "normal": 0, "high": 1000, "urgent": 100_000}
"""Priority classes; numbers between them are allowed."""


def priority_class(priority: int) -> str:
    """Return the name of the highest class that is not above `priority`; the lowest for what is below all."""
    below = [name for name, value in PRIORITIES.items() if value <= priority]
    return max(below, key=PRIORITIES.__getitem__, default=min(PRIORITIES, key=PRIORITIES.__getitem__))


WHOLE_GPU = 1000  # in thousandths, the unit of shares


# ------------------------------------------------------------------------------------------- what there is


class Gpu(Record):
    """A whole card, or a MIG slice of one; `id` is its NVML UUID, which is also what `CUDA_VISIBLE_DEVICES` takes.

    A slice has the `profile` that it was cut by, like 1g.18gb. GPUs of a node in one `island` are joined by NVLink.
    """

    id: Annotated[str, Field(min_length=1, max_length=128)]
    model: str
    memory_bytes: Count
    island: Count = 0
    profile: Profile | None = None


class Price(Record):
    """The price of an hour, in the platform's currency; `gpus` by model, `gpu` for a model that is not named there."""

    cpu: Part = 0.0
    gpu: Part = 0.0
    gpus: dict[str, Part] = {}


class HeldByOthers(Record):
    """What is held of a node by others than this platform: the cluster's own pods, and those of other teams.

    `gpus` counts devices by their profile; whole ones have none (""). Which ones they are is not known.
    """

    cpus: Count = 0
    memory_bytes: Count = 0
    gpus: dict[str, Count] = {}


class Node(Record):
    """A machine that runs jobs. Its GPUs are handed out in the order given: neighbours stand side by side.

    Nodes with one `fabric` see each other by RDMA. `shares` says whether its whole GPUs can be had in parts (MPS). A
    `cordoned` node starts no further jobs. What `others` hold is not free, and may become so. Where there are several
    clusters, it belongs to one: all replicas of a job run in one `cluster`. A `burst` node is used if no other will do.
    `price` is that of its cluster; none: that of the platform.
    """

    name: Name
    zone: Name
    jurisdiction: Jurisdiction
    cpus: Count
    memory_bytes: Count
    gpus: tuple[Gpu, ...] = ()
    pool: Name = "default"
    labels: frozenset[Name] = frozenset()
    fabric: Name | None = None
    shares: bool = False
    cordoned: bool = False
    others: HeldByOthers | None = None
    cluster: Name | None = None
    burst: bool = False
    price: Price | None = None

    @model_validator(mode="after")
    def _no_gpu_twice(self) -> Node:
        _refuse_repeated(f"GPU of node {self.name}", (gpu.id for gpu in self.gpus))
        return self


class Quota(Record):
    """An amount that the running jobs of a queue hold together; none: no bound. A part of a GPU counts as a part."""

    cpus: Count | None = None
    gpus: Count | None = None
    memory_bytes: Count | None = None


class Queue(Record):
    """The jobs of one team; a job in a queue that is not there does not start.

    `quota` is its own: it gets that back whenever it wants it. `limit` is the most that it may hold with what it
    borrows; none: its quota, which is never exceeded. What a queue holds counts for its `parent` too, and the parent's
    limit holds for all below it together. `history` is the share of the whole that it has held lately; the longer ago,
    the less it counts.
    """

    name: Name
    quota: Quota = Quota()
    parent: Name | None = None
    limit: Quota | None = None
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = 1.0
    history: Part = 0.0


class Budget(Record):
    """The rest of a workspace's budget in this period: GPU-hours and money; none: no bound. Below zero is overspent."""

    workspace: ObjectId
    gpu_hours: float | None = None
    money: float | None = None


# ------------------------------------------------------------------------------------------ what is asked


class Resources(Record):
    """The resources that one replica holds while it runs.

    `gpus` are whole cards; with a `gpu_profile`, MIG slices of that profile; with `gpu_milli` below 1000, so many
    thousandths of one card by MPS, with `gpu_memory_bytes` of its memory. `gpu_models` names the models that will do.
    """

    cpus: AtLeastOne = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    memory_bytes: Count = 0
    gpu_milli: Annotated[int, Field(ge=1, le=WHOLE_GPU)] = WHOLE_GPU
    gpu_memory_bytes: Count = 0
    gpu_models: frozenset[str] | None = None
    gpu_profile: Profile | None = None

    @model_validator(mode="after")
    def _kinds_of_gpu(self) -> Resources:
        if self.gpu_milli < WHOLE_GPU and (self.gpus != 1 or self.gpu_profile):
            raise ValueError(
                f"{self.gpu_milli} thousandths are of 1 whole GPU, not of {self.gpus}, nor of a slice"
            )
        if (self.gpu_models is not None or self.gpu_profile) and not self.gpus:
            raise ValueError("gpu_models and gpu_profile are for a job that asks for GPUs")
        if self.gpu_models is not None and not self.gpu_models:
            raise ValueError("gpu_models names at least one model")
        return self


class Affinity(Record):
    """Which nodes will do: only those in `pools` (none: any), with all of `labels`, without any of `avoid`.

    `near` and `apart` name groups of jobs: on a node beside one of each, or not beside any. With `spread` each replica
    has a node of its own. `island` keeps the gang in one NVLink island of one node, or in one RDMA fabric; without it
    the gang is kept together as far as there is room now.
    """

    pools: frozenset[Name] = frozenset()
    labels: frozenset[Name] = frozenset()
    avoid: frozenset[Name] = frozenset()
    near: frozenset[Name] = frozenset()
    apart: frozenset[Name] = frozenset()
    spread: bool = False
    island: Literal["nvlink", "rdma"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Affinity:
        if self.spread and self.island == "nvlink":
            raise ValueError("replicas on nodes of their own are not in one NVLink island")
        if both := (self.near & self.apart) | (self.labels & self.avoid):
            raise ValueError(f"{', '.join(sorted(both))} cannot be both wanted and avoided")
        return self


class Demand(Record):
    """The demand of one task on one node: whole GPUs, or thousandths of one GPU.

    `gpu_milli` below 1000 is a share of a single GPU. `gpu_models` names the models that will do; none: any.
    """

    cpus_milli: Count = 0
    memory_bytes: Count = 0
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    gpu_milli: Annotated[int, Field(ge=1, le=WHOLE_GPU)] = WHOLE_GPU
    gpu_models: frozenset[str] | None = None

    @model_validator(mode="after")
    def _a_share_is_of_one_gpu(self) -> Demand:
        if self.gpu_milli < WHOLE_GPU and self.gpus != 1:
            raise ValueError(f"a share of {self.gpu_milli} thousandths is of 1 GPU, not of {self.gpus}")
        if self.gpu_models is not None and not (self.gpus and self.gpu_models):
            raise ValueError("gpu_models names at least one model, and only for a task that asks for a GPU")
        return self


class Request(Record):
    """The resource request of a job: `replicas` alike, all started together or none.

    In a queue a higher `priority` goes first, then who was submitted earlier. `label` is the restriction that flowed in
    from the job's inputs. `time_limit` is enforced: a job that states one can be let in before a larger one's turn.
    A job that is not `preemptible` never borrows. One with a `claim` is what others were evicted for: it goes first.
    `data_zones` are those in which its inputs lie; of several clusters one there is preferred.
    """

    job: ObjectId
    queue: Name = "default"
    replicas: AtLeastOne = 1
    each: Resources = Resources()
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    submitted_at: AwareDatetime
    label: Label = UNRESTRICTED
    time_limit: Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=3650))] | None = None
    workspace: ObjectId | None = None
    group: Name | None = None
    affinity: Affinity = Affinity()
    preemptible: bool = True
    claim: bool = False
    data_zones: frozenset[Name] = frozenset()


class Placement(Record):
    """The node of one replica, and its GPUs."""

    replica: Count
    node: Name
    gpus: tuple[str, ...] = ()


class RunningJob(Record):
    """A started job, and the moment by which it ends at the latest, if that is known.

    It `borrows` if it was started beyond its queue's quota; it is `leaving` once it was told to make room.
    """

    request: Request
    placements: tuple[Placement, ...]
    started_at: AwareDatetime
    ends_by: AwareDatetime | None = None
    borrows: bool = False
    leaving: bool = False


class Snapshot(Record):
    """The input of a scheduling decision at the moment `now`. The order within each part has no meaning."""

    now: AwareDatetime
    nodes: tuple[Node, ...]
    queues: tuple[Queue, ...]
    pending: tuple[Request, ...] = ()
    running: tuple[RunningJob, ...] = ()
    budgets: tuple[Budget, ...] = ()
    price: Price = Price()

    @model_validator(mode="after")
    def _nothing_twice(self) -> Snapshot:
        _refuse_repeated("node", (node.name for node in self.nodes))
        _refuse_repeated("queue", (queue.name for queue in self.queues))
        jobs = [request.job for request in self.pending]
        _refuse_repeated("job", [*jobs, *(running.request.job for running in self.running)])
        return self

    @model_validator(mode="after")
    def _queues_are_a_tree(self) -> Snapshot:
        parents = {queue.name: queue.parent for queue in self.queues}
        sound: set[str] = set()  # these have no ring above them
        for name in parents:
            path: dict[str, None] = {}  # in order
            above: str | None = name
            while above is not None and above not in sound:
                if above not in parents:
                    raise ValueError(f"queue {[*path][-1]} has the parent {above}, which is not there")
                if above in path:
                    raise ValueError(f"queue {above} stands above itself: {', '.join(path)}")
                path[above] = None
                above = parents[above]
            sound.update(path)
        return self


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if len(set(listed)) != len(listed):
        repeated = next(name for name in listed if listed.count(name) > 1)
        raise ValueError(f"{what} {repeated} stands twice")


# --------------------------------------------------------------------------------------- what is decided


class Reason(StrEnum):
    """Why a job waits. The last six do not pass by waiting alone."""

    CAPACITY = "capacity"
    RESERVED = "reserved"
    QUOTA = "quota"
    PREEMPTING = "preempting"
    KUEUE = "kueue"
    AFFINITY = "affinity"
    BUDGET = "budget"
    CORDONED = "cordoned"
    TOPOLOGY = "topology"
    RESIDENCY = "residency"
    TOO_LARGE = "too-large"
    NO_QUEUE = "no-queue"


class Start(Record):
    """All replicas of `job` start now, where `placements` say; it `borrows` what goes beyond its queue's quota."""

    kind: Literal["start"] = "start"
    job: ObjectId
    placements: tuple[Placement, ...]
    borrows: bool = False


class Wait(Record):
    """`job` stays in its queue."""

    kind: Literal["wait"] = "wait"
    job: ObjectId
    reason: Reason


class Evict(Record):
    """`job` makes room for `by`, which gets a claim: it saves itself, goes back to its queue, and later goes on."""

    kind: Literal["evict"] = "evict"
    job: ObjectId
    by: ObjectId
    why: Literal["reclaim", "priority"]


Decision = Annotated[Start | Wait | Evict, Field(discriminator="kind")]


class Explanation(Record):
    """Why a job is where it is.

    `position` counts from 1 over all queues, none once it runs. `share` is its queue's score: what it holds and has
    held lately, as a share of the whole, by weight; the lowest goes first. `would_start` are single changes, each of
    which lets the job start now. `expected_start` supposes that every job runs to its limit and nobody comes in
    between; none: unknown.
    """

    job: ObjectId
    state: Literal["running", "starting", "waiting"]
    reason: Reason | None = None
    words: str
    position: int | None = None
    of: int
    share: float | None = None
    would_start: tuple[str, ...] = ()
    expected_start: AwareDatetime | None = None
