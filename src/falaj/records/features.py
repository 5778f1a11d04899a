"""Features: what they are of, where they come from, and the training sets made of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from falaj.records.governance.residency import Label
from falaj.records.names import DataClass, Jurisdiction, Name, ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record

ViewRef = Annotated[Reference, RefersTo("view")]
DatasetRef = Annotated[Reference, RefersTo("dataset")]

Column = Annotated[
    str,
    TextRule(
        r"(?!__)[A-Za-z_][A-Za-z0-9_]*", "a column is A-Z, a-z, 0-9 and '_', not beginning '__'", limit=128
    ),
]
Duration = Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=36_500))]


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


Moment = Annotated[datetime, AfterValidator(_in_utc)]
"""A moment; one that does not say where it was is in UTC."""


class ColumnType(StrEnum):
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TEXT = "text"
    MOMENT = "moment"


NUMBERS = (ColumnType.INTEGER, ColumnType.FLOAT)


class Feature(Record):
    """A column and its type."""

    name: Column
    type: ColumnType


class Entity(Record):
    """The subject of features: a driver, a route. `key` is the column that identifies one."""

    name: Name
    key: Column
    type: Annotated[ColumnType, Field(description="integer or text")] = ColumnType.TEXT

    @field_validator("type")
    @classmethod
    def _key_is_comparable(cls, given: ColumnType) -> ColumnType:
        if given not in (ColumnType.INTEGER, ColumnType.TEXT):
            raise ValueError("the key of an entity is integer or text")
        return given


class AggregateFunction(StrEnum):
    COUNT = "count"
    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    STD = "std"


class Aggregation(Record):
    """A feature that sums up a column over the window that ends with each row, that row included."""

    name: Column
    column: Column
    function: AggregateFunction
    window: Duration

    @property
    def feature(self) -> Feature:
        counts = self.function is AggregateFunction.COUNT
        return Feature(name=self.name, type=ColumnType.INTEGER if counts else ColumnType.FLOAT)


class FeatureView(Record):
    """Rows about entities, over time. `sql` makes them from the input `source`; without it they are as uploaded.

    `columns` are stored. They are the features, unless there are `aggregations`: then those are. `ttl` is how old a
    value may be when it is used. `created_time` says when a row was known; without it, when it happened.
    """

    name: Name
    entities: Annotated[tuple[Name, ...], Field(min_length=1, max_length=8)]
    columns: Annotated[tuple[Feature, ...], Field(min_length=1, max_length=1000)]
    event_time: Column = "event_time"
    created_time: Column | None = None
    ttl: Duration | None = None
    sql: Annotated[str, Field(max_length=100_000)] | None = None
    aggregations: Annotated[tuple[Aggregation, ...], Field(max_length=200)] = ()
    only: Annotated[tuple[Jurisdiction, ...], Field(min_length=1)] | None = None
    classes: tuple[DataClass, ...] = ()

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(each.feature for each in self.aggregations) or self.columns

    @property
    def own_label(self) -> Label:
        only = None if self.only is None else frozenset(self.only)
        return Label(only=only, classes=frozenset(self.classes))

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        moments = [self.event_time] + ([self.created_time] if self.created_time else [])
        stored = [column.name for column in self.columns] + moments
        for names in (stored, [feature.name for feature in self.features] + moments):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"columns are named once: {', '.join(sorted(twice))}")
        unknown = {each.column for each in self.aggregations} - {column.name for column in self.columns}
        if unknown:
            raise ValueError(f"aggregations are over columns of the view, not {', '.join(sorted(unknown))}")
        numbers = {column.name for column in self.columns if column.type in NUMBERS}
        words = [
            f"{each.name} ({each.function} of {each.column})"
            for each in self.aggregations
            if each.function is not AggregateFunction.COUNT and each.column not in numbers
        ]
        if words:
            raise ValueError(f"only count takes what is neither integer nor float: {', '.join(words)}")
        return self


class StoredView(Record):
    """A version of a view. `table_version` pins its rows; none before the first ingestion."""

    id: ObjectId
    workspace: ObjectId
    zone: str
    label: Label
    version: int
    definition: FeatureView
    keys: tuple[Feature, ...]
    table_version: int | None
    rows: int
    online_version: int | None = None
    created_at: datetime


class ChangeKind(StrEnum):
    NEW = "new"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


class PlannedChange(Record):
    """The planned change of a definition. `differences` are the fields that are new in this version of a view."""

    kind: Literal["entity", "view"]
    name: str
    change: ChangeKind
    version: int | None = None
    differences: tuple[str, ...] = ()


class ApplyResult(Record):
    """The result of applying definitions: new entities, the views as they are now, and each change."""

    entities: tuple[str, ...]
    views: tuple[StoredView, ...]
    changes: tuple[PlannedChange, ...] = ()


class IngestResult(Record):
    view: ObjectId
    version: int
    table_version: int
    added: int
    rows: int


class PinnedView(Record):
    """Exactly what a training set read of a view."""

    view: ObjectId
    version: int
    table_version: int


def pin_of(view: StoredView) -> PinnedView:
    """Return the pinned version of `view` for reading its rows now."""
    return PinnedView(view=view.id, version=view.version, table_version=view.table_version or 0)


class TrainingSet(Record):
    """A spine with the features of some views as they were known at each row's time.

    `spine_pin` says which rows the spine was, where it is a view.
    """

    id: ObjectId
    workspace: ObjectId
    name: str
    zone: str
    label: Label
    spine: ObjectId
    spine_pin: PinnedView | None = None
    since: datetime | None = None
    until: datetime | None = None
    event_time: str
    views: tuple[PinnedView, ...]
    columns: tuple[str, ...]
    table_version: int
    rows: int
    created_at: datetime


class MaterializeResult(Record):
    view: ObjectId
    version: int
    table_version: int
    keys: int
    written: int


Value = int | float | bool | str | None


class OnlineRow(Record):
    """The newest features of one key, in the order of the answer's `features`; none where unknown or too old."""

    key: str
    event_time: datetime | None
    values: tuple[Value, ...]


class OnlineRows(Record):
    version: int
    features: tuple[str, ...]
    rows: tuple[OnlineRow, ...]
