"""What an import reads: experiments, runs, points and files of another tracker, and where it is told of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

from falaj.records.tracking import DatasetInput, LoggedModelStatus, RunStatus

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MODEL_STATUSES: dict[str | int, LoggedModelStatus] = {
    1: "pending",
    2: "ready",
    3: "failed",
    "LOGGED_MODEL_PENDING": "pending",
    "LOGGED_MODEL_READY": "ready",
    "LOGGED_MODEL_UPLOAD_FAILED": "failed",
}
INFINITE = 1.7976931348623157e308
"""What the SQL stores of MLflow keep of an infinity."""


class SourceExperiment(NamedTuple):
    """`mark` tells it from all other experiments, also those of other sources with the same id."""

    id: str
    name: str
    mark: str
    tags: Mapping[str, str]
    is_deleted: bool = False


@dataclass(frozen=True)
class SourceRun:
    """A run without its points and files; `place` is where the source finds those."""

    id: str
    experiment: str
    name: str
    status: RunStatus
    started_at: datetime | None
    ended_at: datetime | None
    user: str
    parent: str | None = None
    is_deleted: bool = False
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[DatasetInput] = ()
    place: str = ""


class SourcePoint(NamedTuple):
    key: str
    value: float
    step: int
    at: datetime


class ModelPoint(NamedTuple):
    """A measurement of a logged model in a run, on the dataset of that name and digest."""

    run: str
    point: SourcePoint
    dataset: str | None = None
    dataset_digest: str | None = None


@dataclass(frozen=True)
class SourceModel:
    """A logged model of MLflow 3 without its files; `place` is where the source finds those."""

    id: str
    experiment: str
    name: str
    type: str
    status: LoggedModelStatus
    run: str | None = None
    is_deleted: bool = False
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    points: Sequence[ModelPoint] = ()
    place: str = ""


SourceOwner = SourceRun | SourceModel
"""What has files."""


class SourceFile(NamedTuple):
    """A file of a run or a model; `text` is its content if the import makes it."""

    path: str
    size_bytes: int
    text: bytes | None = None


class RunSource(Protocol):
    """A tracker that is read. Its bytes are a stranger's: all of it is checked here or by the operations."""

    kind: str
    where: str
    notes: SourceNotes

    def experiments(self) -> Sequence[SourceExperiment]: ...

    def rows(self, experiments: Sequence[SourceExperiment]) -> int | None:
        """Return how many runs and points these experiments have, if that is known before they are read."""

    def runs(self, experiment: SourceExperiment) -> Iterator[SourceRun]:
        """Yield the runs of an experiment, also deleted ones, the oldest first."""

    def series(self, run: SourceRun) -> Mapping[str, int]:
        """Return the number of different points of each metric of a run."""

    def points(self, run: SourceRun, keys: Collection[str]) -> Iterator[SourcePoint]:
        """Yield the points of these metrics of a run, each metric by step and time."""

    def models(self, experiment: SourceExperiment) -> Iterator[SourceModel]: ...

    def files(self, owner: SourceOwner) -> Sequence[SourceFile]: ...

    def read(self, owner: SourceOwner, path: str) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class SourceNotes:
    """What a source found and does not hand over, by why, with the first places."""

    SHOWN = 3

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, why: str, where: str) -> None:
        self._counts[why] += 1
        places = self._places.setdefault(why, [])
        if len(places) < self.SHOWN and where not in places:
            places.append(where)

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{why}: {count}, such as {', '.join(self._places[why])}" for why, count in self._counts.items()
        )


def from_millis(millis: int | None) -> datetime | None:
    """Return a moment of MLflow, or None if it has none or one that no calendar has."""
    if millis is None:
        return None
    try:
        return EPOCH + timedelta(milliseconds=millis)
    except (OverflowError, ValueError):
        return None


def measured(value: float) -> float:
    """Return a value of MLflow; the largest number of its SQL stores stands for infinity."""
    return float("inf") if value >= INFINITE else float("-inf") if value <= -INFINITE else value
