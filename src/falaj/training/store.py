"""The SQL of training."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, insert, select, update

from falaj.governance.objects import stored_object
from falaj.governance.tables import objects
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Placement
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
_running = select(
    jobs.c.id, jobs.c.attempt, jobs.c.cancelling, jobs.c.leaving, jobs.c.interrupting, jobs.c.placements
).where(jobs.c.state == JobState.RUNNING)
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


class QueuedJob(NamedTuple):
    """What the queue is decided by, of a job that waits or runs, as the database stores it."""

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


def job_row(tx: Transaction, job: str) -> Any:
    return tx.execute(_row, {"id": job}).mappings().one()


def lock_job(tx: Transaction, job: str) -> Any:
    """The row of a job; until the transaction ends, nobody else changes it."""
    return tx.execute(_row.with_for_update(), {"id": job}).mappings().one()


def update_job(tx: Transaction, job: str, **values: Any) -> None:
    tx.execute(update(jobs).where(jobs.c.id == job).values(**values))


def queue(tx: Transaction) -> list[QueuedJob]:
    """The jobs that wait or run, oldest first; there may be very many, so each is read as it lies."""
    return [QueuedJob(*row) for row in tx.execute_sql(_QUEUE)]


def running(tx: Transaction) -> list[Any]:
    """What has to be looked after, of each job that runs."""
    return list(tx.execute(_running).mappings())


def record_queue_change(tx: Transaction) -> None:
    """Tell whoever waits for it that the queue has changed."""
    tx.execute_sql(_TOUCH)


def queue_version(tx: Transaction) -> int:
    """How often the queue has changed."""
    found = tx.execute_sql(_CHANGES)
    return int(found[0][0]) if found else 0


def has_unfinished(tx: Transaction, workspace: str, *, at_least: int) -> bool:
    """Whether so many jobs of a workspace wait or run; quick where there are not so many in all."""
    if tx.execute_sql(_COUNT_ALL)[0][0] < at_least:
        return False
    return int(tx.execute_sql(_COUNT, (workspace,))[0][0]) >= at_least


def has_running(tx: Transaction) -> bool:
    """Whether an attempt is under way, or was when the platform was killed."""
    query = select(jobs.c.id).where(jobs.c.state == JobState.RUNNING).limit(1)
    return tx.execute(query).first() is not None


def list_jobs(
    tx: Transaction, workspace: str, *, state: str | None, before: str, limit: int
) -> list[tuple[StoredObject, Any]]:
    """Jobs of a workspace with their rows, newest first."""
    query = select(objects, jobs.c.id.label("job")).join(jobs, jobs.c.id == objects.c.id)
    query = query.where(objects.c.workspace == workspace, objects.c.deleted_at.is_(None))
    if state is not None:
        query = query.where(jobs.c.state == state)
    if before:
        query = query.where(objects.c.id < before)
    found = tx.execute(query.order_by(objects.c.id.desc()).limit(limit)).mappings()
    return [(stored_object(each), job_row(tx, each["job"])) for each in found]


def job_record(found: StoredObject, row: Any) -> Job:
    spec = JobSpec.model_validate(row["spec"])
    placed = row["placements"] or []
    return Job(
        id=found.id,
        workspace=found.workspace,
        name=spec.name,
        state=JobState(row["state"]),
        reason=row["reason"],
        attempt=row["attempt"],
        run=row["run"],
        node=placed[0]["node"] if placed else None,
        exit_code=row["exit_code"],
        progress=None if row["progress"] is None else JobProgress.model_validate(row["progress"]),
        cancelling=row["cancelling"],
        leaving=row["leaving"],
        moving=row["leaving"] and row["evicted_for"] is None,
        preemptions=row["preemptions"],
        outputs=tuple(JobOutput.model_validate(each) for each in row["outputs"]),
        submitted_at=found.created_at,
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        owner=found.owner,
        label=found.label,
        code=row["code"],
        spec=spec,
    )


def abbreviate(job: Job) -> Job:
    """Without the diff of its code, which may be long, and all but the first way that its memory was estimated for."""
    origin, estimate = job.spec.origin, job.spec.estimate
    if origin is not None:
        origin = origin.model_copy(update={"diff": ""})
    if estimate is not None:
        estimate = estimate.model_copy(update={"ways": estimate.ways[:1]})
    short = job.spec.model_copy(update={"origin": origin, "estimate": estimate})
    return job.model_copy(update={"spec": short})


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
    """How an attempt ended, in words; none for one that has not, or that there was never."""
    query = select(attempts.c.verdict, attempts.c.reason).where(
        attempts.c.job == job, attempts.c.number == number, attempts.c.verdict.is_not(None)
    )
    found = tx.execute(query).first()
    if found is None:
        return None
    said = "failed" if found.verdict == "failed" else f"was {found.verdict}"
    return f"attempt {number} {said}" + (f": {found.reason}" if found.reason else "")


def attempt_log(tx: Transaction, job: str, number: int) -> ObjectId | None:
    """The blob that has the log of an attempt which is over."""
    query = select(attempts.c.log).where(attempts.c.job == job, attempts.c.number == number)
    found: ObjectId | None = tx.execute(query).scalar()
    return found


# ----------------------------------------------------------------------------------------- checkpoints


def checkpoints_of(tx: Transaction, job: str) -> list[Checkpoint]:
    """The checkpoints of a job, newest first."""
    query = select(checkpoints).where(checkpoints.c.job == job).order_by(checkpoints.c.step.desc())
    return [_checkpoint(each) for each in tx.execute(query).mappings()]


def _checkpoint(row: Any) -> Checkpoint:
    parts = tuple(CheckpointPart.model_validate(each) for each in row["parts"])
    rest = row["size_bytes"] - sum(each.size_bytes for each in parts)
    manifest = CheckpointPart(blob=row["manifest"], size_bytes=rest)
    return Checkpoint.model_validate({**row, "manifest": manifest, "parts": parts})


def put_checkpoint(tx: Transaction, new: Checkpoint) -> None:
    drop_checkpoint(tx, new.job, new.step)
    tx.execute(insert(checkpoints), new.model_dump(mode="json") | {"manifest": new.manifest.blob})


def drop_checkpoint(tx: Transaction, job: str, step: int) -> None:
    tx.execute(delete(checkpoints).where(checkpoints.c.job == job, checkpoints.c.step == step))
