"""Queries of the training tables, and their rows as typed records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import RowMapping, bindparam, delete, func, insert, select, update

from falaj.governance.objects import stored_object
from falaj.governance.tables import objects
from falaj.ports.metadata import Transaction
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

_row = select(jobs).where(jobs.c.id == bindparam("id"))
_running = select(jobs.c.id, jobs.c.attempt, jobs.c.cancelling, jobs.c.leaving, jobs.c.placements).where(
    jobs.c.state == JobState.RUNNING
)
_QUEUE = (
    "SELECT j.id, j.state, j.request, CASE WHEN j.request IS NULL THEN j.spec END, o.label, o.workspace, o.created_at, "
    "j.attempt, j.not_before, j.claim, j.leaving, j.borrows, j.placements, j.started_at FROM training_jobs j "
    "JOIN governance_objects o ON o.id = j.id WHERE j.state IN ('queued', 'running') ORDER BY j.id"
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
    differs from what `spec` asks for while a running job is being moved, and is None for jobs older than the column.
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
    request: Request | None
    queue: str
    leaving: bool
    claim: bool
    borrows: bool
    evicted_for: ObjectId | None
    preemptions: int


class RunningJobRow(NamedTuple):
    """The columns of a running job that the controller reads at each tick. `nodes` are those of its placements."""

    id: ObjectId
    attempt: int
    cancelling: bool
    leaving: bool
    nodes: tuple[str, ...]


class QueuedJob(NamedTuple):
    """The columns of a queued or running job that scheduling depends on, as the database stores them."""

    id: ObjectId
    state: str
    request: str | None
    spec: str | None
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


def lock_job(tx: Transaction, job: str) -> JobRow:
    """Return the row of a job, locked against other writers until the transaction ends."""
    return _job_row(tx.execute(_row.with_for_update(), {"id": job}).one()._asdict())


def _job_row(row: dict[str, Any]) -> JobRow:
    progress, request, actions = row["progress"], row["request"], row["actions"]
    parsed = {
        "spec": JobSpec.model_validate(row["spec"]),
        "state": JobState(row["state"]),
        "actions": None if actions is None else tuple(actions),
        "placements": tuple(Placement.model_validate(each) for each in row["placements"] or ()),
        "progress": None if progress is None else JobProgress.model_validate(progress),
        "outputs": tuple(JobOutput.model_validate(each) for each in row["outputs"]),
        "request": None if request is None else Request.model_validate(request),
    }
    return JobRow(**{**row, **parsed})


def update_job(tx: Transaction, job: str, **values: Any) -> None:
    tx.execute(update(jobs).where(jobs.c.id == job).values(**values))


def queue(tx: Transaction) -> list[QueuedJob]:
    """Return the queued and running jobs, oldest first. There may be many, so their columns are not parsed here."""
    return [QueuedJob(*row) for row in tx.execute_sql(_QUEUE)]


def running(tx: Transaction) -> list[RunningJobRow]:
    """Return the running jobs."""
    rows = tx.execute(_running).all()
    return [
        RunningJobRow(ident, attempt, cancelling, leaving, tuple(each["node"] for each in placements or ()))
        for ident, attempt, cancelling, leaving, placements in rows
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
    """Return whether any job runs, or ran when the platform was killed."""
    query = select(jobs.c.id).where(jobs.c.state == JobState.RUNNING).limit(1)
    return tx.execute(query).first() is not None


def list_jobs(
    tx: Transaction, workspace: str, *, state: str | None, before: str, limit: int
) -> list[tuple[StoredObject, JobRow]]:
    """Return jobs of a workspace with their rows, newest first."""
    query = select(objects, jobs.c.id.label("job")).join(jobs, jobs.c.id == objects.c.id)
    query = query.where(objects.c.workspace == workspace, objects.c.deleted_at.is_(None))
    if state is not None:
        query = query.where(jobs.c.state == state)
    if before:
        query = query.where(objects.c.id < before)
    found = tx.execute(query.order_by(objects.c.id.desc()).limit(limit)).mappings()
    return [(stored_object(each), job_row(tx, each["job"])) for each in found]


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
        node=row.placements[0].node if row.placements else None,
        exit_code=row.exit_code,
        progress=row.progress,
        cancelling=row.cancelling,
        leaving=row.leaving,
        moving=row.leaving and row.evicted_for is None,
        preemptions=row.preemptions,
        outputs=row.outputs,
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
    tx: Transaction,
    job: str,
    number: int,
    *,
    placements: Sequence[Placement],
    borrows: bool,
    now: datetime,
) -> None:
    tx.execute(insert(attempts), {"job": job, "number": number, "started_at": now})
    placed = [each.model_dump(mode="json") for each in placements]
    update_job(
        tx,
        job,
        state=JobState.RUNNING,
        attempt=number,
        reason=None,
        placements=placed,
        interrupting=False,
        exit_code=None,
        started_at=now,
        not_before=None,
        borrows=borrows,
        claim=False,
        leaving=False,
        evicted_for=None,
    )
    record_queue_change(tx)


def end_attempt(tx: Transaction, job: str, number: int, **values: Any) -> None:
    tx.execute(update(attempts).where(attempts.c.job == job, attempts.c.number == number).values(**values))


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
