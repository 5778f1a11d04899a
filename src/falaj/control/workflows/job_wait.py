"""Waiting for a job on behalf of work, which takes the job with it when it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext
from falaj.errors import Conflict, FalajError
from falaj.ports.workflows import JsonObject


def wait_for_job(
    services: Services, context: WorkflowContext, name: str, job: str, look: Callable[[], JsonObject | None]
) -> JsonObject:
    """What `look` finds once the job has ended; a step called `name`. If the wait is broken off, the job is stopped."""
    try:
        return context.wait(name, look)
    except FalajError:
        context.undo("stop the job", lambda: _stop(services, job))
        raise


def _stop(services: Services, job: str) -> JsonObject:
    if not services.jobs.show(job).state.ended:
        with suppress(Conflict):  # it has ended meanwhile
            services.jobs.cancel(job)
    return {"job": job}
