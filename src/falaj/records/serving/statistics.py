"""Counts, rates and observations of the versions of an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from pydantic import Field

from falaj.records.names import Name, ObjectId
from falaj.records.record import Record
from falaj.records.serving.endpoints import ScoringRule

BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""Upper bounds of the latency buckets in seconds; one more bucket holds the rest."""


class VersionCounts(Record):
    """The counts of one version since the last report; `latency` counts by bucket, `lost` was not logged."""

    version: Name
    requests: Annotated[int, Field(ge=0)] = 0
    errors: Annotated[int, Field(ge=0)] = 0
    rows: Annotated[int, Field(ge=0)] = 0
    latency: Annotated[tuple[int, ...], Field(max_length=64)] = ()
    lost: Annotated[int, Field(ge=0)] = 0


class ReportReceipt(Record):
    versions: int


class VersionStats(Record):
    """The statistics of one version. The score is over the `labelled` rows: its mean, and its variance between rows.

    Labels of `unscored` rows do not count: what was predicted is not a finite number.
    """

    version: str
    requests: int = 0
    errors: int = 0
    rows: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    slow_ms: float | None = None
    """The bound of the latency histogram next below its p95."""
    slow_share: float | None = None
    """The share of its requests that took longer than `slow_ms`."""
    labelled: int = 0
    unscored: int = 0
    score_mean: float | None = None
    score_variance: float | None = None


class VersionLoad(Record):
    """Counts of a version on one replica since that started; `latency` counts by bucket."""

    endpoint: ObjectId
    name: str
    version: str
    replica: str
    requests: int
    errors: int
    rows: int
    latency: tuple[int, ...]
    batches: int
    """Runs of the model, and the rows that it was given, by all endpoints that route to it."""
    batch_rows: int
    waiting: int


class ReplicaUsage(Record):
    """A process of the model server. `clock_s` and `cpu_s` grow: divide by their differences to get rates."""

    replica: str
    pid: int
    clock_s: float
    cpu_s: float
    rss_bytes: int
    connections: int


class ServerLoad(Record):
    """What the model server does now, in counts that grow; two of them show the rates between."""

    replicas: tuple[ReplicaUsage, ...]
    versions: tuple[VersionLoad, ...]


class EndpointStats(Record):
    endpoint: str
    since: datetime | None
    scoring: ScoringRule | None
    versions: tuple[VersionStats, ...]


class Observation(Record):
    """What came in at once while several versions answer: counts of requests, or scores by version.

    A prediction is scored once, by its first label; `scores` has one value for each request, the mean of its rows.
    """

    number: int
    at: datetime
    requests: tuple[VersionCounts, ...] = ()
    scores: dict[str, tuple[float, ...]] = {}


class EndpointObservations(Record):
    """Observations since the routes changed, in the order in which they were stored; `next`: more follow it."""

    endpoint: str
    since: datetime
    scoring: ScoringRule | None
    items: tuple[Observation, ...]
    next: int | None = None


def percentile_ms(latency: Sequence[int], share: float) -> float | None:
    """Return the `share` quantile of latency, interpolated within its bucket; None without requests."""
    total = sum(latency)
    if not total:
        return None
    wanted, below, seen = share * total, 0.0, 0
    for number, bound in zip(latency, [*BOUNDS_S, BOUNDS_S[-1]], strict=False):
        if number and seen + number >= wanted:
            return 1000 * (below + (bound - below) * (wanted - seen) / number)
        seen, below = seen + number, bound
    return 1000 * BOUNDS_S[-1]
