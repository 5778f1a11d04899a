"""The interface between a workflow and the controller: steps that are one operation each, waits and undo steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from falaj.control.services import Services
from falaj.errors import Conflict, FalajError
from falaj.ports.workflows import JsonObject, WorkflowSteps
from falaj.records.record import Record

LONGEST_PAUSE_S = 10.0
"""A waiting workflow polls at least this often."""

Workflow = Callable[[Services, "WorkflowContext", JsonObject], JsonObject]


class WorkflowContext(WorkflowSteps, Protocol):
    """The steps of a workflow, one operation each."""

    def wait(
        self,
        name: str,
        poll: Callable[[], JsonObject | None],
        *,
        every_s: float = 1.0,
        longest_s: float = LONGEST_PAUSE_S,
    ) -> JsonObject:
        """Run a step that lasts until `poll` returns a value; each poll is authorized anew.

        A poll only reads, or has effects that may be repeated. The pauses grow from `every_s` to `longest_s`.
        """
        ...

    def undo(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        """Run a step that reverts an earlier one, as the controller itself: the requester may have lost the right to.

        It also runs for cancelled work, which ends as cancelled after it.
        """
        ...

    def as_controller(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        """Run a step as the controller itself: what the requester may not do, such as record a verdict."""
        ...

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        """Report what the work is doing and, where it can be counted, how much of it is done."""
        ...


def wait_for_job(
    services: Services, context: WorkflowContext, name: str, job: str, poll: Callable[[], JsonObject | None]
) -> JsonObject:
    """Wait in a step called `name` until `poll` finds that the job has ended; cancel the job if the wait fails."""
    try:
        return context.wait(name, poll)
    except FalajError:
        context.undo("stop the job", lambda: _cancel(services, job))
        raise


def _cancel(services: Services, job: str) -> JsonObject:
    if not services.jobs.show(job).state.ended:
        with suppress(Conflict):  # it has ended meanwhile
            services.jobs.cancel(job)
    return {"job": job}


def to_json(record: Record) -> JsonObject:
    """Return `record` as the JSON that steps store."""
    dumped: JsonObject = record.model_dump(mode="json")
    return dumped
