"""Monitors of endpoints: what they compare, the windows that servers hand in, and the alerts that come of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AwareDatetime, Field, model_validator

from falaj.records.governance.residency import Label
from falaj.records.monitoring.sketches import (
    Column,
    ColumnKind,
    ColumnRole,
    Count,
    DriftVerdict,
    FalseAlarmBudget,
    ModelDrift,
    WindowSketch,
)
from falaj.records.names import ObjectId, Reference, RefersTo
from falaj.records.record import Record

MonitorRef = Annotated[Reference, RefersTo("monitor")]
AlertRef = Annotated[Reference, RefersTo("alert")]
WatchedEndpoint = Annotated[Reference, RefersTo("endpoint")]

DEFAULT_ROWS = 1000
SMALLEST_ROWS = 80
"""Below it the method gives no verdict."""


class MonitorWindow(Record):
    """A window is complete once it holds at least `rows` rows and has lasted at least `duration`.

    With a duration alone, a window may be too small to be judged, and then says so.
    """

    rows: Annotated[int, Field(ge=SMALLEST_ROWS, le=1_000_000_000)] | None = None
    duration: Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=366))] | None = None

    @model_validator(mode="after")
    def _ends_some_time(self) -> Self:
        if self.rows is None and self.duration is None:
            raise ValueError("a window has a number of rows, a duration, or both")
        return self

    @property
    def least_rows(self) -> int:
        return self.rows or 1

    @property
    def least_time(self) -> timedelta:
        return self.duration or timedelta(0)


class WindowRecord(WindowSketch):
    """The inputs and predictions of one endpoint version on one server, sent every few seconds.

    `rows` are the rows of the window. One that is too large for a request travels in parts, each with some of the
    columns; then only the first part counts the rows.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)]
    rows: Count


class WindowReceipt(Record):
    """The receipt of recorded windows: nothing is stored of an endpoint without a monitor."""

    endpoint: ObjectId
    stored: int
    monitors: int


class VersionProgress(Record):
    """The progress of a monitor on one version: the rows that wait for a complete window, and the last verdict."""

    version: str
    windows: int
    rows: int
    waiting_rows: int
    waiting_since: AwareDatetime | None
    verdict: DriftVerdict | None
    judged_until: AwareDatetime | None
    own_reference: tuple[str, ...]


class Monitor(Record):
    """Watches an endpoint for drift from a training set, whose sketches are pinned.

    `columns` are those of the training set that were pinned; with `all_columns` they were not chosen, and those that
    the endpoint does not see are passed over.
    """

    id: ObjectId
    workspace: ObjectId
    name: str
    endpoint: ObjectId
    training_set: ObjectId
    reference_rows: int
    columns: tuple[Column, ...]
    all_columns: bool
    window: MonitorWindow
    budget: FalseAlarmBudget
    label: Label
    versions: tuple[VersionProgress, ...] = ()
    alert: ObjectId | None = None
    created_at: datetime


class MonitorReport(Record):
    """An endpoint compared with its training set: one report for each version, drifted ones first."""

    monitor: ObjectId
    name: str
    endpoint: ObjectId
    verdict: DriftVerdict
    looks: tuple[ModelDrift, ...]
    words: str


class ColumnDrift(Record):
    """The drift of one column in one window; `effect` is in standard deviations, 0 where nothing was shown."""

    name: str
    role: ColumnRole
    verdict: DriftVerdict
    effect: float


class DriftWindow(Record):
    """A window of one version, compared with the reference of now."""

    version: str
    since: datetime
    until: datetime
    rows: int
    verdict: DriftVerdict
    columns: tuple[ColumnDrift, ...]


class DriftHistory(Record):
    """The windows that are kept of a monitor's endpoint, oldest first; old ones are merged, so they are longer."""

    monitor: ObjectId
    name: str
    windows: tuple[DriftWindow, ...]


class ColumnDistribution(Record):
    """The values of a column in the reference (`before`) and in a time (`now`), as rows in each bin.

    Numbers have `edges`, one more than bins; what lies outside is in the first and the last bin. Others have
    `categories`, the last of which may be `others`. `nulls` are counted apart: in the reference, and in that time.
    """

    column: str
    version: str
    since: datetime
    until: datetime
    kind: ColumnKind
    edges: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    before: tuple[float, ...]
    now: tuple[float, ...]
    nulls: tuple[int, int]


class AlertState(StrEnum):
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    ENDED = "ended"


class Alert(Record):
    """A drift that began: `since` and `until` are of the first window that showed it.

    `rows` is the size of that window, `rows_seen` all that the monitor had seen of the version by its end. `windows`
    counts the drifted windows so far, `last_until` is the end of the last. `report` is that of the first window; lists
    leave it out.
    """

    id: ObjectId
    workspace: ObjectId
    monitor: ObjectId
    endpoint: ObjectId
    version: str
    state: AlertState
    columns: tuple[str, ...]
    words: str
    since: datetime
    until: datetime
    rows: int
    rows_seen: int
    raised_at: datetime
    windows: int
    last_until: datetime
    acknowledged_by: str | None = None
    acknowledged_at: datetime | None = None
    ended_at: datetime | None = None
    report: ModelDrift | None = None
    label: Label


class EvaluationSummary(Record):
    """The result of an evaluation: windows evaluated, alerts raised, alerts ended."""

    windows: int = 0
    raised: tuple[ObjectId, ...] = ()
    ended: tuple[ObjectId, ...] = ()


class MonitorRemoval(Record):
    monitor: ObjectId
