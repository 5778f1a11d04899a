"""Waiting for a job on behalf of work, which takes the job with it when it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from falaj.control.platform import Rooms
from falaj.control.walk import Walk
from falaj.errors import Conflict, FalajError
from falaj.ports.workflows import Json


def job_ended(rooms: Rooms, walk: Walk, name: str, job: str, look: Callable[[], Json | None]) -> Json:
    """What `look` finds once the job has ended; a step called `name`. If the wait is broken off, the job is stopped."""
    try:
        return walk.wait(name, look)
    except FalajError:
        walk.undo("stop the job", lambda: _stop(rooms, job))
        raise


def _stop(rooms: Rooms, job: str) -> Json:
    if not rooms.jobs.show(job).state.ended:
        with suppress(Conflict):  # it has ended meanwhile
            rooms.jobs.cancel(job)
    return {"job": job}
