"""Durable work: a workflow of steps that goes on where it was after the process dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

JsonObject = dict[str, Any]


class WorkflowSteps(Protocol):
    """Handed to a workflow's body: each step's result is kept, so that a step which ended is not run again.

    A step that was interrupted runs again: steps must be idempotent.
    """

    @property
    def workflow(self) -> str:
        """The id of this run."""
        ...

    def run(self, name: str, body: Callable[[], JsonObject]) -> JsonObject: ...


class WorkflowOutcome(NamedTuple):
    """How a workflow ended: its result, or in words why it has none."""

    result: JsonObject | None
    error: str | None = None
    cancelled: bool = False


WorkflowBody = Callable[[WorkflowSteps, JsonObject], JsonObject]


class Workflows(Protocol):
    """An engine for workflows. Exactly one process may have it launched; the lease sees to that."""

    def launch(self, bodies: dict[str, WorkflowBody]) -> None:
        """Take up unfinished workflows and be ready for new ones."""
        ...

    def start(self, workflow_id: str, name: str, inputs: JsonObject) -> None:
        """Start `name` under the id `ident`; nothing happens if that id was started before."""
        ...

    def outcome(self, workflow_id: str) -> WorkflowOutcome | None:
        """How `ident` ended; none while it runs or is unknown."""
        ...

    def cancel(self, workflow_id: str) -> None:
        """Stop `ident` before its next step."""
        ...

    def close(self) -> None: ...
