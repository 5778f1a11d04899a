"""`platform.run`: a run that a script logs to while a `with` block lasts."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from falaj.errors import FalajError
from falaj.records.tracking import Artifact, MetricPoint, Outcome, Run

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform


class ActiveRun:
    """A run that is logged to. After its block it is finished; failed after an exception, killed after an interrupt."""

    def __init__(self, platform: Platform, run: Run) -> None:
        self._platform = platform
        self.run = run

    @property
    def id(self) -> str:
        return self.run.id

    def log(self, *, step: int = 0, **metrics: float) -> None:
        """Log metrics of a step; they are stored once the call returns."""
        points = tuple(
            MetricPoint(key=name, value=float(value), step=step) for name, value in metrics.items()
        )
        if points:
            self._platform.runs.log_metrics(self.id, points, batch=uuid.uuid4().hex)

    def params(self, **values: Any) -> None:
        """Record parameters; one that the run has keeps its value."""
        self._platform.runs.log_params(self.id, values)

    def tags(self, **values: str) -> None:
        """Set tags; existing ones are replaced."""
        self._platform.runs.set_tags(self.id, values)

    def artifact(self, path: str, data: bytes | Path) -> Artifact:
        """Upload `data` and attach it to the run under `path`, such as plots/roc.png."""
        name = f"{self.id}.{uuid.uuid4().hex[:8]}"
        blob = self._platform.put(name, data, workspace=self.run.workspace, sources=(self.id,))
        return self._platform.runs.log_artifact(self.id, path, blob.id)

    def end(self, *, status: Outcome = "finished") -> Run:
        """End the run; the `with` block does it otherwise."""
        self.run = self._platform.runs.end(self.id, status=status)
        return self.run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.run.status.ended:
            return
        if error is None:
            self.end()
            return
        try:
            self.end(status="failed" if isinstance(error, Exception) else "killed")
        except FalajError as failed:  # what the block raised is what counts
            error.add_note(f"run {self.id} could not be ended: {failed.message}")

    def __repr__(self) -> str:
        return f"<run {self.run.name} ({self.id}), {self.run.status}>"
