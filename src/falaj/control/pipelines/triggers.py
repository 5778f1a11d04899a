"""What starts a pipeline without a person: drift on its endpoint, and its schedule."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from falaj.control.pipelines import service
from falaj.control.services import Services
from falaj.errors import Denied, FalajError, Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.identity.tokens import caller_for
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.governance.operations.gate import Gate
from falaj.monitoring import store as monitoring
from falaj.ports.metadata import Transaction
from falaj.records.control.pipelines import Cause, StoredPipeline
from falaj.records.names import ObjectId

log = logging.getLogger("falaj.triggers")


RETRY = timedelta(minutes=10)
"""So long a pipeline that could not be started is left alone."""

RetryTimes = dict[ObjectId, datetime]
"""Pipelines that could not be started, and when that is tried again."""


def start_due(gate: Gate, services: Services, *, fence: int, resting: RetryTimes | None = None) -> None:
    """Start the pipelines that drift or their schedule calls for, each for whoever applied it."""
    now, resting = gate.clock(), {} if resting is None else resting
    with gate.database.read() as tx:
        due = [
            (pipeline, behalf, cause)
            for pipeline, behalf in service.idle(tx)
            if not _rests(resting, pipeline.id, now=now)
            and (cause := find_cause(tx, pipeline, now=now)) is not None
        ]
    for pipeline, behalf, cause in due:
        try:
            _start(gate, services, pipeline, behalf, cause, fence=fence)
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            resting[pipeline.id] = now + RETRY
            log.warning(
                "a pipeline could not be started",
                extra={"pipeline": pipeline.definition.name, "reason": error.message},
            )


def _rests(resting: RetryTimes, ident: ObjectId, *, now: datetime) -> bool:
    """Also where the clock was put back."""
    until = resting.get(ident)
    return until is not None and until - RETRY <= now < until


def find_cause(tx: Transaction, pipeline: StoredPipeline, *, now: datetime) -> Cause | None:
    """Why a pipeline that is not at work is to be started now; none if it is not."""
    plan, since = pipeline.definition, pipeline.started_at
    if plan.every is not None and now >= (since or pipeline.created_at) + plan.every:
        return "schedule"
    rested = since is None or now >= since + plan.rest
    if plan.on_drift and rested and _has_drifted(tx, pipeline, since):
        return "drift"
    return None


def _has_drifted(tx: Transaction, pipeline: StoredPipeline, since: datetime | None) -> bool:
    """Whether an alert was raised on the endpoint after the last start, and still stands."""
    endpoint = objects.by_name(
        tx, workspace=pipeline.workspace, kind="endpoint", name=pipeline.definition.endpoint
    )
    if endpoint is None:
        return False
    return any(since is None or raised > since for raised in monitoring.open_alert_times(tx, endpoint.id))


def _start(
    gate: Gate, services: Services, pipeline: StoredPipeline, behalf: ObjectId, cause: Cause, *, fence: int
) -> None:
    with gate.database.read() as tx:
        person = objects.by_id(tx, behalf)
    if person is None:
        raise Denied(f"whoever applied pipeline {pipeline.definition.name} is gone")
    key = f"{pipeline.id}:{cause}:{pipeline.started_at}"
    with acting_as(caller_for(person, origin="controller")), on_terms(key=key, fence=fence):
        work = services.pipelines.start(pipeline.id, cause=cause)
    log.info("a pipeline was started", extra={"pipeline": pipeline.definition.name, "work": work.id})
