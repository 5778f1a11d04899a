"""The queue: what machines offer, what jobs ask for, and what is decided about them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from falaj.records.names import Jurisdiction, Name, ObjectId
from falaj.records.record import Record
from falaj.records.residency import UNRESTRICTED, Label

Count = Annotated[int, Field(ge=0, le=2**53)]
AtLeastOne = Annotated[int, Field(ge=1, le=1_000_000)]

HIGHEST_PRIORITY = 1_000_000
WHOLE_GPU = 1000  # in thousandths, the unit of shares


# ------------------------------------------------------------------------------------------- what there is


class Gpu(Record):
    """A whole card; `id` is its NVML UUID, which is also what `CUDA_VISIBLE_DEVICES` takes."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    model: str
    memory_bytes: Count


class Node(Record):
    """A machine that runs jobs. Its GPUs are handed out in the order given: neighbours stand side by side."""

    name: Name
    zone: Name
    jurisdiction: Jurisdiction
    cpus: Count
    memory_bytes: Count
    gpus: tuple[Gpu, ...] = ()

    @model_validator(mode="after")
    def _no_gpu_twice(self) -> Node:
        _refuse_repeated(f"GPU of node {self.name}", (gpu.id for gpu in self.gpus))
        return self


class Quota(Record):
    """The most that the running jobs of a queue may hold together; none: no limit."""

    cpus: Count | None = None
    gpus: Count | None = None
    memory_bytes: Count | None = None


class Queue(Record):
    """Whose turn it is among the jobs of one team; a job in a queue that is not there does not start."""

    name: Name
    quota: Quota = Quota()


# ------------------------------------------------------------------------------------------ what is asked


class Resources(Record):
    """What one replica holds while it runs."""

    cpus: AtLeastOne = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    memory_bytes: Count = 0


class Demand(Record):
    """What one task asks of one node, fine enough for shares: whole GPUs, or so many thousandths of one GPU.

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
    """What a job asks for: `replicas` alike, all started together or none.

    A higher `priority` goes first, then who was submitted earlier. `label` is the restriction that flowed in from
    the job's inputs. `time_limit` is enforced: a job that states one can be let in before a larger one's turn.
    """

    job: ObjectId
    queue: Name = "default"
    replicas: AtLeastOne = 1
    each: Resources = Resources()
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    submitted_at: AwareDatetime
    label: Label = UNRESTRICTED
    time_limit: Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=3650))] | None = None


class Placement(Record):
    """Where one replica runs, and which GPUs are its own."""

    replica: Count
    node: Name
    gpus: tuple[str, ...] = ()


class Running(Record):
    """A started job, and the moment by which it ends at the latest, if that is known."""

    request: Request
    placements: tuple[Placement, ...]
    started_at: AwareDatetime
    ends_by: AwareDatetime | None = None


class Snapshot(Record):
    """All that a decision depends on, at the moment `now`. The order within each part means nothing."""

    now: AwareDatetime
    nodes: tuple[Node, ...]
    queues: tuple[Queue, ...]
    pending: tuple[Request, ...] = ()
    running: tuple[Running, ...] = ()

    @model_validator(mode="after")
    def _nothing_twice(self) -> Snapshot:
        _refuse_repeated("node", (node.name for node in self.nodes))
        _refuse_repeated("queue", (queue.name for queue in self.queues))
        jobs = [request.job for request in self.pending]
        _refuse_repeated("job", [*jobs, *(running.request.job for running in self.running)])
        return self


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if len(set(listed)) != len(listed):
        repeated = next(name for name in listed if listed.count(name) > 1)
        raise ValueError(f"{what} {repeated} stands twice")


# --------------------------------------------------------------------------------------- what is decided


class Reason(StrEnum):
    """Why a job waits. The last three do not pass by waiting alone."""

    CAPACITY = "capacity"
    RESERVED = "reserved"
    QUOTA = "quota"
    RESIDENCY = "residency"
    TOO_LARGE = "too-large"
    NO_QUEUE = "no-queue"


class Start(Record):
    """All replicas of `job` start now, where `placements` say."""

    kind: Literal["start"] = "start"
    job: ObjectId
    placements: tuple[Placement, ...]


class Wait(Record):
    """`job` stays in its queue."""

    kind: Literal["wait"] = "wait"
    job: ObjectId
    reason: Reason


Decision = Annotated[Start | Wait, Field(discriminator="kind")]


class Explanation(Record):
    """Why a job is where it is.

    `position` counts from 1 over all queues, none once it runs. `would_start` are single changes, each of which
    lets the job start now. `expected_start` supposes that every job runs to its time limit and that nobody comes in
    between; none: unknown.
    """

    job: ObjectId
    state: Literal["running", "starting", "waiting"]
    reason: Reason | None = None
    words: str
    position: int | None = None
    of: int
    would_start: tuple[str, ...] = ()
    expected_start: AwareDatetime | None = None
