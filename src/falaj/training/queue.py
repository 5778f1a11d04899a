"""Snapshots of the queue for the scheduler: queued and running jobs, nodes, queues and budgets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from falaj.ports.metadata import Transaction, from_micros
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import (
    Affinity,
    Node,
    Placement,
    Request,
    Resources,
    RunningJob,
    Snapshot,
)
from falaj.records.training.jobs import JobSpec, JobState
from falaj.training import store
from falaj.training.dependencies import Accounts
from falaj.training.store import QueuedJob

SPOT = "spot"
"""The label of nodes that can be taken away at any moment."""
LONGEST_PAUSE_S = 300.0
"""The longest backoff between two attempts at a job."""
LONGEST_PAUSE = timedelta(seconds=LONGEST_PAUSE_S)


class QueueSnapshot(NamedTuple):
    """The queue at one moment. `attempts` counts those of each job; `next_due` is when the first backoff ends.

    `handed_over` are the jobs that wait in the queue of a cluster; they are not pending.
    """

    snapshot: Snapshot
    attempts: dict[ObjectId, int]
    next_due: datetime | None
    handed_over: tuple[Request, ...] = ()


class QueueReader:
    """Reads the queue repeatedly; requests are parsed once, because they rarely change."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._known: dict[ObjectId, tuple[object, Request]] = {}

    def snapshot(
        self, tx: Transaction, nodes: Sequence[Node], *, now: datetime, without: Iterable[str] = ()
    ) -> QueueSnapshot:
        """Return all that a decision depends on, without the jobs that back off and those in `without`."""
        rows, aside = store.queue(tx), frozenset(without)
        self._known = {row.id: self._parsed(row) for row in rows}
        running = [row for row in rows if row.state == JobState.RUNNING]
        handed_over = [row for row in rows if row.handed_over]
        waiting = [
            row
            for row in rows
            if row.state != JobState.RUNNING and not row.handed_over and row.id not in aside
        ]
        pausing = [due for row in waiting if not is_due(due := paused_until(row), now=now)]
        snapshot = Snapshot(
            now=now,
            nodes=self._accounts.with_cordons(tx, nodes),
            queues=self._accounts.queues(tx, now=now),
            pending=tuple(self._known[row.id][1] for row in waiting if is_due(paused_until(row), now=now)),
            running=tuple(_running(row, self._known[row.id][1]) for row in running),
            budgets=self._accounts.budgets(tx, now=now),
            price=self._accounts.price,
        )
        attempts = {row.id: row.attempt for row in rows}
        return QueueSnapshot(
            snapshot,
            attempts,
            min((due for due in pausing if due is not None), default=None),
            tuple(self._known[row.id][1] for row in handed_over),
        )

    def _parsed(self, row: QueuedJob) -> tuple[object, Request]:
        made_of = (row.request, row.label, row.claim)
        known = self._known.get(row.id)
        return known if known is not None and known[0] == made_of else (made_of, _request(row))


def request_for(
    job: ObjectId,
    spec: JobSpec,
    *,
    workspace: ObjectId,
    submitted_at: datetime,
    label: Label = UNRESTRICTED,
    data_zones: frozenset[str] = frozenset(),
) -> Request:
    """Return the request of a job: a replica for each of its nodes. Its inputs lie in `data_zones`."""
    return Request(
        job=job,
        queue=spec.queue,
        replicas=spec.nodes,
        each=Resources(
            cpus=spec.cpus,
            gpus=spec.gpus,
            memory_bytes=spec.memory_bytes or 0,
            gpu_milli=spec.gpu_milli,
            gpu_memory_bytes=spec.gpu_memory_bytes or 0,
            gpu_models=spec.gpu_models,
            gpu_profile=spec.gpu_profile,
        ),
        priority=spec.priority,
        submitted_at=submitted_at,
        label=label,
        time_limit=spec.timeout,
        workspace=workspace,
        group=spec.group,
        affinity=affinity_of(spec),
        preemptible=spec.preemptible,
        data_zones=data_zones,
    )


def affinity_of(spec: JobSpec) -> Affinity:
    """Return the affinity of a job. One that is not preemptible is kept off spot nodes, unless it asks for them."""
    asked = spec.affinity
    if spec.preemptible or SPOT in asked.labels | asked.avoid:
        return asked
    return asked.model_copy(update={"avoid": asked.avoid | {SPOT}})


def request_of(job: StoredObject, spec: JobSpec, *, data_zones: frozenset[str] = frozenset()) -> Request:
    """Return the request of a stored job with this `spec`."""
    return request_for(
        job.id,
        spec,
        workspace=job.workspace,
        submitted_at=job.created_at,
        label=job.label,
        data_zones=data_zones,
    )


def is_due(pause: datetime | None, *, now: datetime) -> bool:
    """Return whether a backoff is over. One that ends later than the longest backoff began under a wrong clock."""
    return pause is None or not now < pause <= now + LONGEST_PAUSE


def paused_until(row: QueuedJob) -> datetime | None:
    return None if row.not_before is None else from_micros(row.not_before)


def _request(row: QueuedJob) -> Request:
    label = UNRESTRICTED if row.label is None else Label.model_validate_json(row.label)
    kept = Request.model_validate_json(row.request)
    return kept.model_copy(update={"label": label, "claim": bool(row.claim)})


def _running(row: QueuedJob, request: Request) -> RunningJob:
    limit, started_at = request.time_limit, from_micros(row.started_at or row.created_at)
    return RunningJob(
        request=request,
        placements=tuple(Placement.model_validate(each) for each in json.loads(row.placements or "[]")),
        started_at=started_at,
        ends_by=None if limit is None else started_at + limit,
        borrows=bool(row.borrows),
        leaving=bool(row.leaving),
    )
