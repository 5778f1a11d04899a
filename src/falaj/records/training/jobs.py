"""Training jobs: what to run with which inputs on how much of a machine, and what came of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import BlobRef, Name, ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record
from falaj.records.scheduling.snapshot import (
    HIGHEST_PRIORITY,
    WHOLE_GPU,
    Affinity,
    AtLeastOne,
    Count,
    Placement,
    Profile,
    Resources,
)
from falaj.records.tracking import ArtifactPath
from falaj.records.training.frameworks import MOST_PROCESSES, process_fault

JobRef = Annotated[Reference, RefersTo("job")]

_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9_. +=,@()\[\]-]+"
ScriptPath = Annotated[
    str,
    TextRule(
        f"{_PART}(?:/{_PART})*", "a script is a path inside the code, like train.py, no '..'", limit=500
    ),
]
ModuleName = Annotated[
    str,
    TextRule(r"falaj(?:\.[a-z_][a-z0-9_]*)+", "a module is one of Falaj's own, like falaj.x.y", limit=200),
]
Argument = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
VariableName = Annotated[
    str,
    TextRule(
        r"(?!FALAJ_)[A-Za-z_][A-Za-z0-9_]*",
        "a variable is A-Z, a-z, 0-9 and '_', and not one of FALAJ_…, which are the platform's",
        limit=200,
    ),
]
VariableValue = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]
TimeLimit = Annotated[timedelta, Field(ge=timedelta(seconds=1), le=timedelta(days=3650))]
AttemptNumber = Annotated[int, Field(ge=1, le=2**31)]
Framework = Literal["plain", "torch", "tensorflow", "jax", "mpi", "horovod", "xgboost", "lightgbm", "mxnet"]
Words = Annotated[str, StringConstraints(max_length=2000)]

MOST_NODES = 1000

DIFF_CHARACTERS = 65_536
"""The longest diff in a spec; the packed archive holds the code in full."""


class CodeOrigin(Record):
    """The origin of packed code: its commit, and the diff from it (cut if it is long)."""

    commit: Annotated[str, TextRule("[0-9a-f]{40,64}", "a commit is its full hash", limit=64)] | None = None
    diff: Annotated[str, StringConstraints(max_length=DIFF_CHARACTERS)] = ""


class TrainingPlan(Record):
    """A way to train: on so many processes, laid out like this, and the most bytes that one of them takes.

    `as_asked`: the script comes to it by itself, as it stands. `micro_batches` is what it calls `accumulate`.
    """

    processes: AtLeastOne
    layout: Annotated[str, StringConstraints(max_length=100)]
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    micro_batches: AtLeastOne
    peak_bytes: Count
    as_asked: bool


class JobMemoryEstimate(Record):
    """The memory that a training takes, found before it starts; the first of its `ways` is what was asked for.

    `data_bytes` is the data, which lies on a GPU as well if it is small beside it. `method` says whether the step was
    traced on tensors without numbers, or sampled: computed on a few samples.
    """

    device: Literal["cpu", "cuda"]
    batch_size: AtLeastOne
    parameters_bytes: Count
    gradients_bytes: Count
    state_bytes: Count
    activations_bytes: Count
    data_bytes: Count = 0
    method: Literal["traced", "sampled"]
    ways: Annotated[tuple[TrainingPlan, ...], Field(min_length=1, max_length=1000)]


class RequestedResources(Record):
    """The resources that a job requested at first, of those that a move can change."""

    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1
    cpus: AtLeastOne = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    gpu_milli: Annotated[int, Field(ge=1, le=WHOLE_GPU)] = WHOLE_GPU
    gpu_memory_bytes: Annotated[Count, Field(ge=1)] | None = None
    gpu_models: Annotated[frozenset[str], Field(min_length=1, max_length=100)] | None = None
    gpu_profile: Profile | None = None
    pools: frozenset[Name] = frozenset()


class JobSpec(Record):
    """The specification of a job: a `script` of its code, or a `module` of Falaj's own, with `args`.

    It has `nodes` replicas with `processes` each. `cpus`, `gpus`, `memory_bytes` and `disk_bytes` are those of one
    replica, for all its processes together; `roles` count the processes of all replicas. Replicas share a machine
    where they fit on one, unless they are to spread. `inputs` are stored objects by the name under which the job finds
    them: a training set or view as Parquet, a model version as a folder, a blob as a file. `volumes` are folders or
    claims that an administrator lets jobs of the workspace use, by name. After `timeout` an attempt is stopped. After a
    failed attempt `retries` more are made.
    With `nsys` its processes run under Nsight Systems, whose reports are among the outputs.
    With an `estimate` of its memory it is refused where no machine could hold it. `asked` is filled in when a job is
    moved: what it asked for before.
    """

    name: Name
    script: ScriptPath | None = None
    module: ModuleName | None = None
    args: Annotated[tuple[Argument, ...], Field(max_length=1000)] = ()
    framework: Framework = "plain"
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    processes_min: Annotated[int, Field(ge=1, le=256)] | None = None
    roles: Annotated[dict[Name, Annotated[int, Field(ge=0, le=MOST_PROCESSES)]], Field(max_length=8)] = {}
    environment: Name | None = None
    queue: Name = "default"
    cpus: AtLeastOne = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    gpu_milli: Annotated[int, Field(ge=1, le=WHOLE_GPU)] = WHOLE_GPU
    gpu_memory_bytes: Annotated[Count, Field(ge=1)] | None = None
    gpu_models: Annotated[frozenset[str], Field(min_length=1, max_length=100)] | None = None
    gpu_profile: Profile | None = None
    memory_bytes: Annotated[Count, Field(ge=1)] | None = None
    disk_bytes: Annotated[Count, Field(ge=1)] | None = None
    group: Name | None = None
    affinity: Affinity = Affinity()
    preemptible: bool = True
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    timeout: TimeLimit | None = None
    hang_after: TimeLimit | None = None
    inputs: Annotated[dict[Name, Reference], Field(max_length=100)] = {}
    volumes: Annotated[tuple[Name, ...], Field(max_length=20)] = ()
    env: Annotated[dict[VariableName, VariableValue], Field(max_length=200)] = {}
    secrets: Annotated[dict[VariableName, Reference], Field(max_length=100)] = {}
    experiment: Name | None = None
    network: bool = False
    nsys: bool = False
    origin: CodeOrigin | None = None
    estimate: JobMemoryEstimate | None = None
    asked: RequestedResources | None = None

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.script is None) == (self.module is None):
            raise ValueError("a job runs either a script of its code or a module of Falaj's own")
        return self

    @model_validator(mode="after")
    def _no_variable_twice(self) -> Self:
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{', '.join(both)} cannot be both a variable of env and a secret")
        return self

    @model_validator(mode="after")
    def _no_volume_twice(self) -> Self:
        if len({*self.volumes}) < len(self.volumes):
            raise ValueError("a job names each of its volumes once")
        return self

    @model_validator(mode="after")
    def _processes_fit_the_framework(self) -> Self:
        fault = process_fault(
            self.framework,
            nodes=self.nodes,
            processes=self.processes,
            processes_min=self.processes_min,
            roles=self.roles,
        )
        if fault is not None:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _kinds_of_gpu(self) -> Self:
        """Refused here already, with the words of what a replica may ask for."""
        try:
            Resources(
                gpus=self.gpus,
                gpu_milli=self.gpu_milli,
                gpu_models=self.gpu_models,
                gpu_profile=self.gpu_profile,
            )
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        if self.gpu_milli < WHOLE_GPU and self.nodes > 1:
            raise ValueError(f"a part of a GPU is for a job of 1 node; this one has {self.nodes}")
        return self

    @property
    def world_size(self) -> int:
        """The processes of all nodes."""
        return self.nodes * self.processes


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class JobOutput(Record):
    """A file that a job left behind, under its path there: an artifact of the job's run."""

    path: ArtifactPath
    blob: ObjectId


class JobProgress(Record):
    """The progress of a job: its step, the total if that is known, the loss, and the steps a second."""

    step: int
    total: int | None = None
    loss: float | None = None
    rate: float | None = None

    @property
    def left(self) -> timedelta | None:
        """Return the remaining time at this rate."""
        if not self.total or not self.rate or self.step > self.total:
            return None
        return timedelta(seconds=min((self.total - self.step) / self.rate, 3650 * 86400))


class Job(Record):
    """A job and how far it is. `attempt` counts from 1; it is 0 before the first. `reason` says why it is so.

    `preemptions` counts how often it made room for another job; it is `leaving` while it does. It is `moving` while it
    leaves to go on elsewhere. `placements` and `limits` are those of the newest attempt: where its replicas run or ran,
    on which GPUs, and how each limit is enforced.
    """

    id: ObjectId
    workspace: ObjectId
    name: str
    state: JobState
    reason: str | None = None
    attempt: int = 0
    run: ObjectId
    node: str | None = None
    placements: tuple[Placement, ...] = ()
    exit_code: int | None = None
    progress: JobProgress | None = None
    cancelling: bool = False
    leaving: bool = False
    moving: bool = False
    preemptions: int = 0
    outputs: tuple[JobOutput, ...] = ()
    limits: tuple[str, ...] = ()
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    owner: str
    label: Label = UNRESTRICTED
    code: ObjectId | None = None
    spec: JobSpec


Verdict = Literal["done", "failed", "cancelled", "interrupted", "preempted", "moved"]
"""How an attempt ended. One that was interrupted, by a platform that stopped or a node that was lost, or preempted, to
make room for another job, or moved to other machines, does not count against the retries."""

Placements = Annotated[tuple[Placement, ...], Field(min_length=1, max_length=MOST_NODES)]
Outputs = Annotated[tuple[JobOutput, ...], Field(max_length=20_000)]


SaveName = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]
CheckpointCount = Annotated[int, Field(ge=1, le=100)]
PartBlobs = Annotated[tuple[BlobRef, ...], Field(max_length=4096)]


class CheckpointPart(Record):
    """One of the blobs that a checkpoint is made of."""

    blob: ObjectId
    size_bytes: int


class Checkpoint(Record):
    """A checkpoint of a job after a step; a later attempt resumes from it. `save` identifies this attempt to save."""

    job: ObjectId
    step: int
    save: str
    manifest: CheckpointPart
    parts: tuple[CheckpointPart, ...]
    size_bytes: int


class JobMove(Record):
    """A job that was moved. It goes on from its newest checkpoint, which so far is that of `step`; none: it has none,
    and if it saves none before it leaves it begins anew."""

    job: Job
    step: int | None = None
    words: str
