"""What a workflow's body is handed: steps, of which each is one operation, and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from falaj.ports.workflows import Json, Steps


class Walk(Steps, Protocol):
    """The steps of a workflow, one operation each."""

    def wait(self, name: str, look: Callable[[], Json | None], *, every_s: float = 1.0) -> Json:
        """A step that lasts until `look`, which only reads, finds something; it is authorized anew at each look."""
        ...

    def undo(self, name: str, body: Callable[[], Json]) -> Json:
        """A step that puts back what an earlier one changed: also of cancelled work, which then ends as cancelled;
        the controller does it, because whoever asked may have lost the right to."""
        ...

    def say(self, words: str) -> None:
        """What the work is doing, for whoever watches it."""
        ...
