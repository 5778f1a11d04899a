"""Queries of the training tables, and their rows as typed records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from falaj.governance.objects import RowsByIds, rows_by_ids, stored_object
from falaj.governance.tables import objects
from falaj.ports.metadata import Prepared, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Placement, Request
from falaj.records.training.jobs import (
    Checkpoint,
    CheckpointPart,
    Job,
    JobOutput,
    JobProgress,
    JobSpec,
    JobState,
)
from falaj.training.tables import attempts, checkpoints, jobs

_rows = RowsByIds(select(jobs), jobs.c.id)
_row = select(jobs).where(jobs.c.id == bindparam("id"))
_running = select(
    jobs.c.id,
    jobs.c.attempt,
    jobs.c.cancelling,
    jobs.c.leaving,
    jobs.c.placements,
    jobs.c.home,
    jobs.c.fence_s,
    jobs.c.handed_over,
).where(or_(jobs.c.state == JobState.RUNNING.value, jobs.c.handed_over))
_all_running = Prepared(_running)  # read at every tick of the controller
_QUEUE = (
    "SELECT j.id, j.state, j.request, o.label, o.workspace, o.created_at, "
    "j.attempt, j.not_before, j.claim, j.leaving, j.borrows, j.placements, j.started_at, j.handed_over "
    "FROM training_jobs j JOIN governance_objects o ON o.id = j.id WHERE j.state IN ('queued', 'running') ORDER BY j.id"
)
_COUNT_ALL = "SELECT COUNT(*) FROM training_jobs WHERE state IN ('queued', 'running')"
_COUNT = (
    "SELECT COUNT(*) FROM training_jobs j JOIN governance_objects o ON o.id = j.id "
    "WHERE j.state IN ('queued', 'running') AND o.workspace = ?"
)
_TOUCH = (
    "INSERT INTO training_queue_changes (name, count) VALUES ('queue', 1) "
    "ON CONFLICT (name) DO UPDATE SET count = training_queue_changes.count + 1 RETURNING count"
)
_MARKS = "SELECT id, state, reason, attempt, progress FROM training_jobs WHERE id"
_CHANGES = "SELECT count FROM training_queue_changes WHERE name = 'queue'"
_unfinished = (
    select(jobs.c.queue, jobs.c.state, func.count())
    .where(jobs.c.state.in_([JobState.QUEUED, JobState.RUNNING]))
    .group_by(jobs.c.queue, jobs.c.state)
)

SLICE = 900
"""Values per IN list, below every database's limit."""


@dataclass(frozen=True)
class JobRow:
    """A row of the table of jobs, with its JSON columns as records.

    `behalf`, `scope`, `actions` and `token` identify the requester. `request` is what the job holds or waits for; it
    differs from what `spec` asks for while a running job is being moved.
    The attempt of a queued job that was `handed_over` waits in the queue of a cluster.
    """

    id: ObjectId
    spec: JobSpec
    inputs: Mapping[str, ObjectId]
    code: ObjectId | None
    run: ObjectId
    behalf: ObjectId
    scope: ObjectId | None
    actions: tuple[str, ...] | None
    token: str | None
    state: JobState
    reason: str | None
    attempt: int
    failures: int
    cancelling: bool
    interrupting: bool
    placements: tuple[Placement, ...]
    progress: JobProgress | None
    exit_code: int | None
    outputs: tuple[JobOutput, ...]
    not_before: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    request: Request
    queue: str
    leaving: bool
    claim: bool
    borrows: bool
    evicted_for: ObjectId | None
    preemptions: int
    limits: tuple[str, ...]
    home: str | None
    fence_s: int | None
    handed_over: bool

    @property
    def has_attempt(self) -> bool:
        """Return whether its current attempt has not ended: it runs, or waits in the queue of a cluster."""
        return self.state is JobState.RUNNING or self.handed_over


class RunningJobRow(NamedTuple):
    """The columns of a job with an attempt that the controller reads at each tick. `nodes` are where it is placed."""

    id: ObjectId
    attempt: int
    cancelling: bool
    leaving: bool
    nodes: tuple[str, ...]
    home: str | None
    fence_s: int | None
    handed_over: bool = False


class QueuedJob(NamedTuple):
    """The columns of a queued or running job that scheduling depends on, as the database stores them."""

    id: ObjectId
    state: str
    request: str
    label: str | None
    workspace: ObjectId
    created_at: int
    attempt: int
    not_before: int | None
    claim: bool
    leaving: bool
    borrows: bool
    placements: str | None
    started_at: int | None
    handed_over: bool = False


def add_job(tx: Transaction, new: StoredObject, values: dict[str, Any]) -> None:
    fresh: dict[str, Any] = {
        "state": JobState.QUEUED,
        "attempt": 0,
        "failures": 0,
        "cancelling": False,
        "interrupting": False,
        "outputs": [],
    }
    tx.execute(insert(jobs), {"id": new.id, **fresh, **values})
    record_queue_change(tx)


def job_row(tx: Transaction, job: str) -> JobRow:
    """Return the row of a job."""
    return _job_row(tx.execute(_row, {"id": job}).one()._asdict())


def job_rows(tx: Transaction, idents: Sequence[str]) -> dict[str, JobRow]:
    """Return the rows of jobs by their ids."""
    return {row["id"]: _job_row(row) for row in _rows.fetch(tx, idents)}


def lock_job(tx: Transaction, job: str) -> JobRow:
    """Return the row of a job, locked against other writers until the transaction ends."""
    return _job_row(tx.execute(_row.with_for_update(), {"id": job}).one()._asdict())


def _job_row(row: dict[str, Any]) -> JobRow:
    progress, actions = row["progress"], row["actions"]
    parsed = {
        "spec": JobSpec.model_validate(row["spec"]),
        "state": JobState(row["state"]),
        "actions": None if actions is None else tuple(actions),
        "placements": tuple(Placement.model_validate(each) for each in row["placements"] or ()),
        "progress": None if progress is None else JobProgress.model_validate(progress),
        "outputs": tuple(JobOutput.model_validate(each) for each in row["outputs"]),
        "request": Request.model_validate(row["request"]),
        "limits": tuple(row["limits"] or ()),
    }
    return JobRow(**{**row, **parsed})


def update_job(tx: Transaction, job: str, **values: Any) -> None:
    tx.execute(update(jobs).where(jobs.c.id == job).values(**values))


def queue(tx: Transaction) -> list[QueuedJob]:
    """Return the queued and running jobs, oldest first. There may be many, so their columns are not parsed here."""
    return [QueuedJob(*row) for row in tx.execute_sql(_QUEUE)]


def running(tx: Transaction) -> list[RunningJobRow]:
    """Return the jobs with an attempt: those that run, and those that were handed over to the queue of a cluster."""
    return [
        RunningJobRow(
            id=row["id"],
            attempt=row["attempt"],
            cancelling=row["cancelling"],
            leaving=row["leaving"],
            nodes=tuple(each["node"] for each in row["placements"] or ()),
            home=row["home"],
            fence_s=row["fence_s"],
            handed_over=row["handed_over"],
        )
        for row in tx.fetch(_all_running, {})
    ]


def record_queue_change(tx: Transaction) -> None:
    """Increment the version of the queue, which tells the controller that a decision may be due."""
    tx.execute_sql(_TOUCH)


def queue_version(tx: Transaction) -> int:
    """Return the number of changes of the queue so far."""
    found = tx.execute_sql(_CHANGES)
    return int(found[0][0]) if found else 0


def has_unfinished(tx: Transaction, workspace: str, *, at_least: int) -> bool:
    """Return whether a workspace has at least so many unfinished jobs; fast where there are fewer in total."""
    if tx.execute_sql(_COUNT_ALL)[0][0] < at_least:
        return False
    return int(tx.execute_sql(_COUNT, (workspace,))[0][0]) >= at_least


def has_running(tx: Transaction) -> bool:
    """Return whether any job has an attempt, or had one when the platform was killed."""
    return tx.execute(_running.limit(1)).first() is not None


def change_marks(tx: Transaction, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return, for each job, what differs once its state or its progress has changed."""
    return rows_by_ids(tx, _MARKS, idents)


def list_jobs(
    tx: Transaction,
    workspace: str,
    visible: Sequence[ColumnElement[bool]],
    *,
    state: str | None,
    before: str,
    limit: int,
) -> list[tuple[StoredObject, None]]:
    """Return jobs of a workspace that meet the conditions `visible`, newest first."""
    query = select(objects).join(jobs, jobs.c.id == objects.c.id)
    query = query.where(
        objects.c.workspace == workspace, objects.c.kind == "job", objects.c.deleted_at.is_(None), *visible
    )
    if state is not None:
        query = query.where(jobs.c.state == state)
    if before:
        query = query.where(objects.c.id < before)
    found = tx.execute(query.order_by(objects.c.id.desc()).limit(limit)).mappings()
    return [(stored_object(each), None) for each in found]


def job_record(found: StoredObject, row: JobRow) -> Job:
    """Return the record of a job from its object and its row."""
    return Job(
        id=found.id,
        workspace=found.workspace,
        name=row.spec.name,
        state=row.state,
        reason=row.reason,
        attempt=row.attempt,
        run=row.run,
        node=", ".join(dict.fromkeys(placed.node for placed in row.placements)) or None,
        placements=row.placements,
        exit_code=row.exit_code,
        progress=row.progress,
        cancelling=row.cancelling,
        leaving=row.leaving,
        moving=row.leaving and row.evicted_for is None,
        preemptions=row.preemptions,
        outputs=row.outputs,
        limits=row.limits,
        submitted_at=found.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        owner=found.owner,
        label=found.label,
        code=row.code,
        spec=row.spec,
    )


def abbreviate(job: Job) -> Job:
    """Return `job` without the diff of its code and with one memory estimate only: both may be long."""
    origin, estimate = job.spec.origin, job.spec.estimate
    if origin is not None:
        origin = origin.model_copy(update={"diff": ""})
    if estimate is not None:
        estimate = estimate.model_copy(update={"ways": estimate.ways[:1]})
    short = job.spec.model_copy(update={"origin": origin, "estimate": estimate})
    return job.model_copy(update={"spec": short})


# ------------------------------------------------------------------------ figures for other services


def unfinished_in_queues(tx: Transaction) -> dict[str, tuple[int, int]]:
    """Return the numbers of running and of queued jobs for each queue that has any."""
    found: dict[str, tuple[int, int]] = {}
    for queue, state, count in tx.execute(_unfinished):
        running, waiting = found.get(queue, (0, 0))
        found[queue] = (count, waiting) if state == JobState.RUNNING else (running, count)
    return found


def queue_changed(tx: Transaction) -> None:
    """Record that jobs may be able to start which could not before."""
    record_queue_change(tx)


def names_of_jobs(tx: Transaction, idents: Iterable[str]) -> dict[str, str]:
    """Return the names of jobs by their ids."""
    wanted = sorted(set(idents))
    found: dict[str, str] = {}
    for start in range(0, len(wanted), SLICE):
        part = wanted[start : start + SLICE]
        rows = tx.execute(select(jobs.c.id, jobs.c.spec).where(jobs.c.id.in_(part)))
        found |= {ident: spec["name"] for ident, spec in rows}
    return found


# -------------------------------------------------------------------------------------------- attempts


def add_attempt(
    tx: Transaction, job: str, number: int, *, home: str | None, fence_s: int | None, now: datetime
) -> None:
    """Record an attempt at a queued job, which has not started yet."""
    tx.execute(insert(attempts), {"job": job, "number": number, "started_at": now})
    update_job(
        tx,
        job,
        attempt=number,
        reason=None,
        placements=None,
        interrupting=False,
        exit_code=None,
        limits=None,
        home=home,
        fence_s=fence_s,
        not_before=None,
        claim=False,
        leaving=False,
        evicted_for=None,
        handed_over=True,
    )
    record_queue_change(tx)


def start_attempt(
    tx: Transaction, job: str, number: int, *, placements: Sequence[Placement], borrows: bool, now: datetime
) -> None:
    """Record that the attempt runs since `now`, and where."""
    update_attempt(tx, job, number, started_at=now)
    placed = [each.model_dump(mode="json") for each in placements]
    started = {"state": JobState.RUNNING, "reason": None, "started_at": now, "handed_over": False}
    update_job(tx, job, **started, placements=placed, borrows=borrows)
    record_queue_change(tx)


def update_attempt(tx: Transaction, job: str, number: int, **values: Any) -> None:
    tx.execute(update(attempts).where(attempts.c.job == job, attempts.c.number == number).values(**values))


def attempt_began_at(tx: Transaction, job: str, number: int) -> datetime | None:
    """Return when an attempt was recorded, or when it started if it has."""
    query = select(attempts.c.started_at).where(attempts.c.job == job, attempts.c.number == number)
    found: datetime | None = tx.execute(query).scalar()
    return found


def held_gpus(tx: Transaction) -> set[str]:
    """Return the GPUs on which jobs run."""
    query = select(jobs.c.placements).where(jobs.c.state == JobState.RUNNING)
    return {gpu for (placed,) in tx.execute(query) for each in placed or () for gpu in each["gpus"]}


def describe_ending(tx: Transaction, job: str, number: int) -> str | None:
    """Return a sentence on how an attempt ended, or None where it has not ended or does not exist."""
    query = select(attempts.c.verdict, attempts.c.reason).where(
        attempts.c.job == job, attempts.c.number == number, attempts.c.verdict.is_not(None)
    )
    found = tx.execute(query).first()
    if found is None:
        return None
    said = "failed" if found.verdict == "failed" else f"was {found.verdict}"
    return f"attempt {number} {said}" + (f": {found.reason}" if found.reason else "")


def attempt_log(tx: Transaction, job: str, number: int) -> ObjectId | None:
    """Return the blob with the log of an attempt that has ended."""
    query = select(attempts.c.log).where(attempts.c.job == job, attempts.c.number == number)
    found: ObjectId | None = tx.execute(query).scalar()
    return found


# ----------------------------------------------------------------------------------------- checkpoints


def checkpoints_of(tx: Transaction, job: str) -> list[Checkpoint]:
    """Return the checkpoints of a job, newest first."""
    query = select(checkpoints).where(checkpoints.c.job == job).order_by(checkpoints.c.step.desc())
    return [_checkpoint(each) for each in tx.execute(query).mappings()]


def _checkpoint(row: RowMapping) -> Checkpoint:
    parts = tuple(CheckpointPart.model_validate(each) for each in row["parts"])
    rest = row["size_bytes"] - sum(each.size_bytes for each in parts)
    manifest = CheckpointPart(blob=row["manifest"], size_bytes=rest)
    return Checkpoint.model_validate({**row, "manifest": manifest, "parts": parts})


def put_checkpoint(tx: Transaction, new: Checkpoint) -> None:
    drop_checkpoint(tx, new.job, new.step)
    tx.execute(insert(checkpoints), new.model_dump(mode="json") | {"manifest": new.manifest.blob})


def drop_checkpoint(tx: Transaction, job: str, step: int) -> None:
    tx.execute(delete(checkpoints).where(checkpoints.c.job == job, checkpoints.c.step == step))
