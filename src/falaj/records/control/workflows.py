"""Long work: what was asked for, how far it is, and what came of it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from falaj.records.names import ObjectId
from falaj.records.record import Record


class WorkflowState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (WorkflowState.DONE, WorkflowState.FAILED, WorkflowState.CANCELLED)


class WorkflowEnd(Record):
    """How work ended: with a result, or with an error."""

    state: Literal[WorkflowState.DONE, WorkflowState.FAILED, WorkflowState.CANCELLED]
    result: dict[str, Any] | None = None
    error: str | None = None


class WorkflowRun(Record):
    """An intent that the controller carries out; `step` of `steps` are done."""

    id: ObjectId
    workspace: ObjectId
    workflow: str
    state: WorkflowState
    step: int = 0
    steps: int | None = None
    doing: str | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    created_at: datetime
    ended_at: datetime | None = None
