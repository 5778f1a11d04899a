"""Sketches of data windows, and the drift reports of comparing them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field, model_validator

from falaj.records.record import Record

CATEGORY_LIMIT = 1024
"""Categories that a sketch counts by name; the rest is one number, `other`."""
CATEGORY_LENGTH = 64
SKETCH_BYTES_LIMIT = 64 * 1024
FEATURE_LIMIT = 10_000

Count = Annotated[int, Field(ge=0, le=2**62)]
Column = Annotated[str, Field(min_length=1, max_length=256)]
Share = Annotated[float, Field(gt=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _infinity(value: object) -> object:
    """JSON has no infinity: it travels as a word."""
    return float(str(value)) if value in ("Infinity", "-Infinity") else value


Bound = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_infinity)]


class ColumnKind(StrEnum):
    NUMERIC = "numeric"
    CATEGORICAL = "categorical"


class ColumnRole(StrEnum):
    FEATURE = "feature"
    PREDICTION = "prediction"


class DriftVerdict(StrEnum):
    DRIFT = "drift"
    NONE = "none"
    TOO_FEW = "too_few"


class Statistic(StrEnum):
    PSI = "psi"
    KS = "ks"
    CHI_SQUARE = "chi_square"


class SketchRecord(Record):
    """Bytes travel as base64 and infinities as words, so that JSON brings back exactly what was written."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")


class FeatureSketch(SketchRecord):
    """The distribution of one column in constant memory: `count` values and `nulls` (NaN is a null).

    Numeric: a KLL sketch with the exact `minimum` and `maximum`. Categorical: exact counts of at most
    `CATEGORY_LIMIT` categories; `other` values belong to categories that are not counted by name.
    """

    name: Column
    kind: ColumnKind
    role: ColumnRole = ColumnRole.FEATURE
    count: Count = 0
    nulls: Count = 0
    sketch: Annotated[bytes, Field(max_length=SKETCH_BYTES_LIMIT)] | None = None
    minimum: Bound | None = None
    maximum: Bound | None = None
    categories: Annotated[dict[str, Count], Field(max_length=CATEGORY_LIMIT)] = {}
    other: Count = 0

    @property
    def rows(self) -> int:
        return self.count + self.nulls

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        numeric = self.kind is ColumnKind.NUMERIC
        if numeric != (self.sketch is not None) or (numeric and (self.categories or self.other)):
            raise ValueError("a numeric sketch holds KLL bytes, a categorical one counts of categories")
        if (numeric and self.count > 0) != (self.minimum is not None and self.maximum is not None):
            raise ValueError("minimum and maximum belong to a numeric sketch with values, and to no other")
        if not numeric and sum(self.categories.values()) + self.other != self.count:
            raise ValueError("the counts of the categories and of the others add up to `count`")
        if any(len(category) > CATEGORY_LENGTH for category in self.categories):
            raise ValueError(f"a category has at most {CATEGORY_LENGTH} characters")
        if self.other and len(self.categories) < CATEGORY_LIMIT:
            raise ValueError("`other` is used only once all named categories are taken")
        return self


class SketchSet(SketchRecord):
    """Sketches of columns, each name once per role."""

    features: Annotated[tuple[FeatureSketch, ...], Field(max_length=FEATURE_LIMIT)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        if len({(sketch.role, sketch.name) for sketch in self.features}) < len(self.features):
            raise ValueError("a column occurs once per role")
        return self


class BlockSpread(SketchRecord):
    """How much blocks of `span_s` seconds of one column differ from the whole, beyond what chance explains.

    `shares` adds up the variances of the bins' shares beyond those of independent rows, each divided by its share, as
    PSI does: in all directions, of which there are about `dimensions`, and in the `largest`. `ranks` is the largest
    such variance of a cumulative share, as in KS. Their `tail` is the degrees of freedom: few for few blocks, and for
    blocks that lie farther out than normal ones. The `farthest` block is that far from the whole. `blocks` is their
    number, weighted by rows, and `error` the standard error of `shares`.
    """

    span_s: Annotated[float, Field(ge=0)]
    blocks: Annotated[float, Field(gt=1)]
    error: Amount
    shares: Amount
    largest: Amount
    dimensions: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    shares_tail: Annotated[float, Field(gt=0)]
    farthest_shares: Amount
    ranks: Amount
    ranks_tail: Annotated[float, Field(gt=0)]
    farthest_ranks: Amount


class ReferenceSketch(SketchSet):
    """The sketch of the pinned training set, with which windows are compared.

    `spreads` are those of its columns by block of time, the shortest first; a column has none where they cannot be
    estimated: without times, or with too few blocks or rows.
    """

    training_set: str
    spreads: dict[Column, Annotated[tuple[BlockSpread, ...], Field(max_length=32)]] = {}


class WindowSketch(SketchSet):
    """The sketch of the inputs and predictions of one model version from `since` until before `until`."""

    model: str
    since: AwareDatetime
    until: AwareDatetime

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if self.until <= self.since:
            raise ValueError("`until` is later than `since`")
        return self


class RowDependence(StrEnum):
    """Whether rows are taken to depend on each other over time as those of the training set do, or not at all."""

    ESTIMATED = "estimated"
    NONE = "none"


class FalseAlarmBudget(Record):
    """In any `looks` successive looks, the chance of one false alarm or more, over all features, is ≤ `alpha`.

    Each look may spend `alpha / looks` (Bonferroni, valid however the looks depend on each other). With `dependence`
    `none` this holds for independent rows only, as for a replay, where the times of requests tell nothing.
    """

    alpha: Share = 0.05
    looks: Annotated[int, Field(ge=1, le=1_000_000)] = 30
    dependence: RowDependence = RowDependence.ESTIMATED

    @property
    def per_look(self) -> float:
        return self.alpha / self.looks


class Evidence(SketchRecord):
    """One statistic: it is significant where it exceeds `threshold`; `method` says where that comes from.

    `effect` is its size beyond chance and sketching error, as the shift of a normal variable in standard
    deviations (Cohen's d) that would move the statistic as far.
    """

    statistic: Statistic
    value: float
    threshold: float
    p_value: float
    effect: float
    method: str


class DriftReport(SketchRecord):
    """The drift of one feature or prediction; `level` is the false-alarm level that it was tested at.

    `effective_rows` independent rows would vary as much as the window's; none where that is not known.
    """

    name: str
    role: ColumnRole
    kind: ColumnKind
    verdict: DriftVerdict
    effect: float = 0.0
    level: float | None = None
    window_rows: int
    effective_rows: int | None = None
    reference_rows: int
    evidence: tuple[Evidence, ...] = ()
    words: str


class ModelDrift(SketchRecord):
    """One look at one model: drifted columns first, the largest effect on top."""

    model: str
    training_set: str
    since: datetime
    until: datetime
    budget: FalseAlarmBudget
    verdict: DriftVerdict
    reports: tuple[DriftReport, ...]
    words: str

    @property
    def drifted(self) -> tuple[DriftReport, ...]:
        return tuple(report for report in self.reports if report.verdict is DriftVerdict.DRIFT)
