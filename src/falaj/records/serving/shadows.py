"""How the answers of shadows differ from those that were sent."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from falaj.records.names import Name
from falaj.records.record import Record
from falaj.records.serving.endpoints import ServedRoute


class OutputDifference(Record):
    """How an output of a shadow differs from that of the version that answered, over the copied requests."""

    output: Annotated[str, Field(max_length=1024)]
    values: Annotated[int, Field(ge=0)] = 0
    """Numbers of which both are finite; the differences are over these."""
    sum_difference: Annotated[float, Field(ge=0)] = 0.0
    max_difference: Annotated[float, Field(ge=0)] = 0.0
    not_finite: Annotated[int, Field(ge=0)] = 0
    """Numbers that differ and of which one at least is NaN or infinite."""
    classes: Annotated[int, Field(ge=0)] = 0
    """Classes that were compared: texts, whole numbers, the largest of several columns, or the side of 0.5."""
    disagreeing: Annotated[int, Field(ge=0)] = 0

    @property
    def mean_difference(self) -> float | None:
        return self.sum_difference / self.values if self.values else None

    @property
    def disagreement(self) -> float | None:
        """Return the share of classes that differ."""
        return self.disagreeing / self.classes if self.classes else None


class ShadowCounts(Record):
    """What copies of requests showed about the shadow `version`, beside the version `against` that answered them.

    `dropped` copies did not run, because requests waited; `errors` failed, or have other inputs or outputs.
    """

    version: Name
    against: Name
    requests: Annotated[int, Field(ge=0)] = 0
    rows: Annotated[int, Field(ge=0)] = 0
    errors: Annotated[int, Field(ge=0)] = 0
    dropped: Annotated[int, Field(ge=0)] = 0
    latency: Annotated[tuple[int, ...], Field(max_length=64)] = ()
    """Runs of the shadow by duration."""
    against_latency: Annotated[tuple[int, ...], Field(max_length=64)] = ()
    """Runs of the version that answered, of the same requests."""
    outputs: Annotated[tuple[OutputDifference, ...], Field(max_length=1000)] = ()
    problem: Annotated[str, Field(max_length=1000)] | None = None
    """The newest error."""


class ShadowDifference(Record):
    """The difference between a shadow and a version that answered, since the routes changed."""

    version: str
    against: str
    since: datetime
    requests: int
    rows: int
    errors: int
    dropped: int
    p50_ms: float | None
    p99_ms: float | None
    against_p50_ms: float | None
    against_p99_ms: float | None
    outputs: tuple[OutputDifference, ...]
    problem: str | None = None


class ShadowReport(Record):
    """How the shadows of an endpoint would have answered."""

    endpoint: str
    shadows: tuple[ServedRoute, ...]
    differences: tuple[ShadowDifference, ...]
