"""`platform.run`: a run that a script logs to while a `with` block lasts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from falaj.errors import FalajError
from falaj.records.tracking import Artifact, MetricPoint, Outcome, Run
from falaj.sdk.platform import chunks

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform
    from falaj.sdk.run_logging.system_metrics import SystemSampler


class ActiveRun:
    """A run that is logged to. After its block it is finished; failed after an exception, killed after an interrupt."""

    def __init__(
        self, platform: Platform, run: Run, *, system_metrics_every: timedelta | None = None
    ) -> None:
        self._platform = platform
        self.run = run
        self._sampler = None if system_metrics_every is None else self._sample(system_metrics_every)

    def _sample(self, every: timedelta) -> SystemSampler:
        from falaj.sdk.run_logging.system_metrics import SystemSampler

        return SystemSampler(lambda step, found: self._log(found, step=step), every=every)

    @property
    def id(self) -> str:
        return self.run.id

    def log(self, metrics: Mapping[str, float] | None = None, /, *, step: int = 0, **more: float) -> None:
        """Log metrics of a step; they are stored once the call returns. Names with '/' are given as a mapping."""
        self._log({**(metrics or {}), **more}, step=step)

    def _log(self, metrics: Mapping[str, float], *, step: int) -> None:
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
        """Upload `data` as an artifact of the run under `path`, such as model/weights.bin."""
        return self._platform.runs.upload_artifact(self.id, path, chunks(data))

    def log_figure(self, path: str, figure: Any) -> Artifact:
        """Store a figure of matplotlib (.png, .svg, .pdf) or plotly (.html) as an artifact."""
        from falaj.sdk.run_logging.files import figure_bytes

        return self.artifact(path, figure_bytes(path, figure))

    def log_image(self, path: str, image: Any) -> Artifact:
        """Store an image as an artifact: an array of height × width × channels, a PIL image, bytes or a file."""
        from falaj.sdk.run_logging.files import image_bytes

        return self.artifact(path, image_bytes(path, image))

    def log_table(self, path: str, table: Any) -> Artifact:
        """Store a table as an artifact (.json as MLflow has it, .csv, .parquet): a DataFrame, columns, or rows."""
        from falaj.sdk.run_logging.files import table_bytes

        return self.artifact(path, table_bytes(path, table))

    def child(self, name: str | None = None, **options: Any) -> ActiveRun:
        """Start a run inside this one, for a `with` block; `options` are those of runs.start."""
        where = {"workspace": self.run.workspace, "parent": self.id, **options}
        return ActiveRun(self._platform, self._platform.runs.start(self.run.experiment, name=name, **where))

    def end(self, *, status: Outcome = "finished") -> Run:
        """End the run; the `with` block does it otherwise."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
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

    def _repr_html_(self) -> str:
        """Return the run and what was logged to it as HTML, for notebooks."""
        try:
            return self._platform.runs.show(self.id)._repr_html_()
        except FalajError:  # the platform may be closed by now
            return self.run._repr_html_()
