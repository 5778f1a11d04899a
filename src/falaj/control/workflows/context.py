"""What a workflow's body is handed: steps, of which each is one operation, and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from falaj.ports.workflows import JsonObject, WorkflowSteps

LONGEST_PAUSE_S = 10.0
"""A workflow that waits looks at least this often."""


class WorkflowContext(WorkflowSteps, Protocol):
    """The steps of a workflow, one operation each."""

    def wait(
        self,
        name: str,
        look: Callable[[], JsonObject | None],
        *,
        every_s: float = 1.0,
        longest_s: float = LONGEST_PAUSE_S,
    ) -> JsonObject:
        """A step that lasts until `look` finds something; it is authorized anew at each look.

        A look only reads, or does what may be done twice. The pauses between looks grow from `every_s` to `longest_s`.
        """
        ...

    def undo(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        """A step that puts back what an earlier one changed: also of cancelled work, which then ends as cancelled;
        the controller does it, because whoever asked may have lost the right to."""
        ...

    def say(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        """What the work is doing, for whoever watches it, and where that can be counted how much of it is done."""
        ...
