"""The port for durable workflows, which continue where they were after the process dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

JsonObject = dict[str, Any]


class WorkflowSteps(Protocol):
    """Runs the steps of one workflow. The result of each step is stored, and a completed step is not run again.

    A step that was interrupted runs again: steps must be idempotent.
    """

    @property
    def workflow(self) -> str:
        """The id of this run."""
        ...

    def run(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        """Return the result of `body`, or the stored result if the step was completed before."""
        ...


class WorkflowOutcome(NamedTuple):
    """How a workflow ended: with its result, or with an error message."""

    result: JsonObject | None
    error: str | None = None
    cancelled: bool = False


WorkflowBody = Callable[[WorkflowSteps, JsonObject], JsonObject]


class WorkflowEngine(Protocol):
    """An engine for durable workflows. Only one process may have launched it; the controller's lease ensures that."""

    def launch(self, bodies: dict[str, WorkflowBody]) -> None:
        """Resume unfinished workflows, and accept new ones. `bodies` are the workflows by name."""
        ...

    def start(self, workflow_id: str, name: str, inputs: JsonObject) -> None:
        """Start the workflow `name` under `workflow_id`. Without effect if that id was started before."""
        ...

    def outcome(self, workflow_id: str) -> WorkflowOutcome | None:
        """Return how the workflow ended; none while it runs or if it is unknown."""
        ...

    def cancel(self, workflow_id: str) -> None:
        """Stop the workflow before its next step."""
        ...

    def close(self) -> None: ...
