"""Triggers that start pipelines: drift on the endpoint, and the schedule."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from falaj.control.pipelines import service
from falaj.control.services import Services
from falaj.errors import Denied, FalajError, Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.identity.principals import is_disabled
from falaj.governance.identity.tokens import caller_for
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.governance.operations.gate import Gate
from falaj.monitoring import store as monitoring
from falaj.ports.metadata import Transaction
from falaj.records.control.pipelines import Cause, StoredPipeline
from falaj.records.names import ObjectId

log = logging.getLogger("falaj.triggers")

RETRY = timedelta(minutes=10)
"""The pause after a pipeline could not be started."""

RetryTimes = dict[ObjectId, datetime]
"""When to try again to start pipelines that could not be started."""


def start_due(gate: Gate, services: Services, *, fence: int, retry_times: RetryTimes | None = None) -> None:
    """Start the pipelines that drift or their schedule triggers, each on behalf of the user who applied it."""
    now, retry_times = gate.clock(), {} if retry_times is None else retry_times
    with gate.database.read() as tx:
        due = [
            (pipeline, behalf, cause)
            for pipeline, behalf in service.idle(tx)
            if not _backs_off(retry_times, pipeline.id, now=now)
            and (cause := find_cause(tx, pipeline, now=now)) is not None
        ]
    for pipeline, behalf, cause in due:
        try:
            _start(gate, services, pipeline, behalf, cause, fence=fence)
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            retry_times[pipeline.id] = now + RETRY
            log.warning(
                "failed to start pipeline",
                extra={"pipeline": pipeline.definition.name, "reason": error.message},
            )


def _backs_off(retry_times: RetryTimes, ident: ObjectId, *, now: datetime) -> bool:
    """Return whether a retry is not due yet; a pause that is too long began under a wrong clock."""
    until = retry_times.get(ident)
    return until is not None and until - RETRY <= now < until


def find_cause(tx: Transaction, pipeline: StoredPipeline, *, now: datetime) -> Cause | None:
    """Return why an idle pipeline is to be started now, or None."""
    plan, since = pipeline.definition, pipeline.started_at
    if plan.every is not None and now >= (since or pipeline.created_at) + plan.every:
        return "schedule"
    rested = since is None or now >= since + plan.rest
    if plan.on_drift and rested and _has_drifted(tx, pipeline, since):
        return "drift"
    return None


def _has_drifted(tx: Transaction, pipeline: StoredPipeline, since: datetime | None) -> bool:
    """Return whether an alert was raised on the endpoint after the last start, and is still open."""
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
        if person is None or is_disabled(tx, behalf):
            raise Denied(f"the user who applied pipeline {pipeline.definition.name} may no longer act")
    key = f"{pipeline.id}:{cause}:{pipeline.started_at}"
    with acting_as(caller_for(person, origin="controller")), on_terms(key=key, fence=fence):
        work = services.pipelines.start(pipeline.id, cause=cause)
    log.info("pipeline started", extra={"pipeline": pipeline.definition.name, "work": work.id})
