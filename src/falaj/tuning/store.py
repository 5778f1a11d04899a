"""SQL of tuning: rows of studies and trials, and their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, select, update

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.training.jobs import JobSpec
from falaj.records.tuning import (
    ParamImportance,
    Study,
    StudyOutcome,
    StudySettings,
    StudyState,
    StudyTrial,
    TrialReport,
    TrialState,
)
from falaj.tuning.tables import studies, trials

SHOWN_BEST = 20
"""Trials of a Pareto front that the record of a study has; all of them are in the list of its trials."""


@dataclass(frozen=True)
class StudyRow:
    """A row of the table of studies. `stopping` says who asked to stop it; `work` is its newest workflow."""

    id: ObjectId
    settings: StudySettings
    seed: int
    job: JobSpec
    code: ObjectId | None
    state: StudyState
    reason: str | None
    stopping: str | None
    best: tuple[int, ...]
    importance: tuple[ParamImportance, ...]
    run: ObjectId | None
    work: ObjectId | None
    version: str | None
    ended_at: datetime | None


def add_study(tx: Transaction, ident: ObjectId, **values: Any) -> None:
    """Insert a study that begins."""
    tx.execute(
        insert(studies), {"id": ident, "state": StudyState.RUNNING, "best": [], "importance": [], **values}
    )


def update_study(tx: Transaction, ident: ObjectId, **values: Any) -> None:
    tx.execute(update(studies).where(studies.c.id == ident).values(**values))


def study_row(tx: Transaction, ident: ObjectId) -> StudyRow:
    """Return the row of a study."""
    row = tx.execute(select(studies).where(studies.c.id == ident)).mappings().one()
    return StudyRow(
        **{
            **row,
            "settings": StudySettings.model_validate(row["settings"]),
            "job": JobSpec.model_validate(row["job"]),
            "state": StudyState(row["state"]),
            "best": tuple(row["best"]),
            "importance": tuple(ParamImportance.model_validate(each) for each in row["importance"]),
        }
    )


def stopped_by(tx: Transaction, ident: ObjectId) -> str | None:
    """Return who asked to stop a study."""
    found: str | None = tx.execute(select(studies.c.stopping).where(studies.c.id == ident)).scalar_one()
    return found


def study_record(tx: Transaction, found: StoredObject) -> Study:
    """Return the record of a study, with its best trials and the number of trials in each state."""
    row = study_row(tx, found.id)
    counted = select(trials.c.state, func.count()).where(trials.c.study == found.id).group_by(trials.c.state)
    return Study(
        id=found.id,
        workspace=found.workspace,
        name=found.name,
        state=row.state,
        reason=row.reason,
        stopping=row.stopping,
        settings=row.settings,
        job=row.job,
        counts={TrialState(state): count for state, count in tx.execute(counted).all()},
        best=_trials_of(tx, found.id, row.best[:SHOWN_BEST]),
        importance=row.importance,
        run=row.run,
        work=row.work,
        version=row.version,
        owner=objects.name_of(tx, found.owner),
        label=found.label,
        created_at=found.created_at,
        ended_at=row.ended_at,
    )


def _trials_of(tx: Transaction, study: ObjectId, numbers: Sequence[int]) -> tuple[StudyTrial, ...]:
    if not numbers:
        return ()
    query = select(trials).where(trials.c.study == study, trials.c.number.in_(numbers))
    return tuple(_trial(row) for row in tx.execute(query.order_by(trials.c.number)).mappings())


def list_trials(
    tx: Transaction, study: ObjectId, *, state: TrialState | None, before: int | None, limit: int
) -> list[StudyTrial]:
    """Return trials below the number `before`, newest first."""
    query = select(trials).where(trials.c.study == study)
    if state is not None:
        query = query.where(trials.c.state == state)
    if before is not None:
        query = query.where(trials.c.number < before)
    return [_trial(row) for row in tx.execute(query.order_by(trials.c.number.desc()).limit(limit)).mappings()]


def load_trials(tx: Transaction, study: ObjectId) -> tuple[list[StudyTrial], list[int]]:
    """Return all trials by number, and the events of the study in order.

    An event is the number of a trial that was asked for, or -1 - number of one that ended.
    """
    rows = [*tx.execute(select(trials).where(trials.c.study == study).order_by(trials.c.number)).mappings()]
    events = [(row["asked"], row["number"]) for row in rows]
    events += [(row["told"], -1 - row["number"]) for row in rows if row["told"] is not None]
    return [_trial(row) for row in rows], [event for _, event in sorted(events)]


def put_trials(tx: Transaction, study: ObjectId, changed: Sequence[StudyTrial], *, now: datetime) -> None:
    """Insert new trials and update others; Conflict for one that has ended: it is never changed."""
    newest = select(func.max(trials.c.asked), func.max(trials.c.told)).where(trials.c.study == study)
    event = max((each for each in tx.execute(newest).one() if each is not None), default=-1)
    for trial in changed:
        event += 1
        where = trials.c.study == study, trials.c.number == trial.number
        known = tx.execute(select(trials.c.state).where(*where)).scalar_one_or_none()
        if known is None:
            first = {"study": study, "asked": event, "created_at": now, "number": trial.number}
            tx.execute(insert(trials), first | _columns(trial))
            continue
        if TrialState(known).ended:
            raise Conflict(f"trial {trial.number} has ended: {known}")
        over = {"told": event, "ended_at": now} if trial.state.ended else {}
        tx.execute(update(trials).where(*where).values(**_columns(trial), **over))


def outcome_columns(outcome: StudyOutcome) -> dict[str, Any]:
    """Return what an outcome changes in the row of its study."""
    return {
        "best": [*outcome.best],
        "importance": [each.model_dump(mode="json") for each in outcome.importance],
        "run": outcome.run,
        "state": outcome.state,
        "reason": outcome.reason,
        "version": outcome.version,
    }


def _columns(trial: StudyTrial) -> dict[str, Any]:
    return {
        "state": trial.state,
        "params": trial.params,
        "results": [*trial.values],
        "reports": [[each.step, each.value] for each in trial.reports],
        "pruning": trial.pruning,
        "reason": trial.reason,
        "job": trial.job,
        "run": trial.run,
    }


def _trial(row: Any) -> StudyTrial:
    return StudyTrial(
        number=row["number"],
        state=TrialState(row["state"]),
        params=row["params"],
        values=tuple(row["results"]),
        reports=tuple(TrialReport(step=step, value=value) for step, value in row["reports"]),
        pruning=row["pruning"],
        reason=row["reason"],
        job=row["job"],
        run=row["run"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )
