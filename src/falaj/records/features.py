"""Features: what they are of, where they come from, and the training sets made of them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StrictStr,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from falaj.records.expressions.syntax import MAX_CHARACTERS, parse
from falaj.records.governance.residency import Label, union
from falaj.records.names import DataClass, Jurisdiction, Name, ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record

ViewRef = Annotated[Reference, RefersTo("view")]
DatasetRef = Annotated[Reference, RefersTo("dataset")]
QuarantineRef = Annotated[Reference, RefersTo("quarantine")]

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


class InvalidRows(StrEnum):
    """What becomes of a file with invalid rows: it is refused, or they are set aside and the others added."""

    REFUSE = "refuse"
    QUARANTINE = "quarantine"


class RowRule(StrEnum):
    """A rule that a single row can break, named like the field of the definition that declares it.

    `type`: the value can be converted to the type of its column. Keys and times are `not_null` always.
    """

    TYPE = "type"
    NOT_NULL = "not_null"
    MIN = "min"
    MAX = "max"
    ALLOWED = "allowed"
    MAX_AHEAD = "max_ahead"
    UNIQUE = "unique"


class BrokenRule(Record):
    """A rule of a column, and how many rows break it. A row may break several."""

    rule: RowRule
    column: str
    rows: int


WholeNumber = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = WholeNumber | Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Feature(Record):
    """A column and its type. `only` and `classes` label it: they become part of the label of its view.

    The others are rules for rows that come in: a value in every row (`not_null`), a range, the only `allowed` values.
    A null breaks none but the first. `max_null_rate` is the largest share of nulls in a file.
    """

    name: Column
    type: ColumnType
    only: Annotated[tuple[Jurisdiction, ...], Field(min_length=1)] | None = None
    classes: tuple[DataClass, ...] = ()
    not_null: bool = False
    min: Number | None = None
    max: Number | None = None
    allowed: Annotated[tuple[Number | StrictStr, ...], Field(min_length=1, max_length=1000)] | None = None
    max_null_rate: Share | None = None

    @property
    def label(self) -> Label:
        return Label(
            only=None if self.only is None else frozenset(self.only), classes=frozenset(self.classes)
        )

    @property
    def rules(self) -> dict[RowRule, str]:
        """The rules that a single row can break, each in words: what is allowed."""
        found = {RowRule.NOT_NULL: "a value in every row"} if self.not_null else {}
        if self.min is not None:
            found[RowRule.MIN] = f"at least {self.min}"
        if self.max is not None:
            found[RowRule.MAX] = f"at most {self.max}"
        if self.allowed is not None:
            found[RowRule.ALLOWED] = f"one of {', '.join(map(str, self.allowed))}"
        return found

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        bounds = [bound for bound in (self.min, self.max) if bound is not None]
        if bounds and self.type not in NUMBERS:
            raise ValueError("min and max are rules of integer and float columns")
        if self.allowed is not None and self.type not in (*NUMBERS, ColumnType.TEXT):
            raise ValueError("allowed is a rule of integer, float and text columns")
        kinds: tuple[type, ...] = (str,) if self.type is ColumnType.TEXT else (int, float)
        kinds = (int,) if self.type is ColumnType.INTEGER else kinds
        if odd := [value for value in (*bounds, *(self.allowed or ())) if not isinstance(value, kinds)]:
            raise ValueError(f"rules of this column have values of its type, {self.type}, not {odd[0]!r}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min must not exceed max")
        return self


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


EXACT = (AggregateFunction.SUM, AggregateFunction.MIN, AggregateFunction.MAX)
"""Functions that make an integer of integers."""


class Aggregation(Record):
    """A feature that sums up a column over the window that ends with each row, that row included."""

    name: Column
    column: Column
    function: AggregateFunction
    window: Duration

    def feature_of(self, column: ColumnType | None) -> Feature:
        """Return the feature that the aggregation of a column of that type is."""
        is_exact = self.function in EXACT and column is ColumnType.INTEGER
        is_integer = is_exact or self.function is AggregateFunction.COUNT
        return Feature(name=self.name, type=ColumnType.INTEGER if is_integer else ColumnType.FLOAT)


class KnownAt(StrEnum):
    """What says when a row became known: a column of the view, the platform's clock, or the row's event time."""

    CREATED_TIME = "created_time"
    INGESTION = "ingestion"
    EVENT_TIME = "event_time"


class FeatureView(Record):
    """Rows about entities, over time. `sql` makes them from the input `source`; without it they are as uploaded.

    `columns` are stored. They are the features, unless there are `aggregations`: then those are. `ttl` is how old a
    value may be when it is used.

    `created_time` is the column that says when a row was known. Without it, `known_at` is "ingestion" by default: the
    rows of the first load, and of back-fills, were known when they happened, others when they came in. "event_time"
    takes all rows as known when they happened: a row that comes in late then changes what older rows of a training set
    get.

    Rules for rows that come in, besides those of columns: `max_ahead` is how far an event time may lie in the future;
    `unique` rows of a file have different keys and times; `freshness` is how old the newest event time of a file may
    be. A file with rows that break a rule is refused, unless `invalid_rows` is "quarantine": then they are set aside,
    if they are at most `max_invalid_share` of the file.
    """

    name: Name
    entities: Annotated[tuple[Name, ...], Field(min_length=1, max_length=8)]
    columns: Annotated[tuple[Feature, ...], Field(min_length=1, max_length=1000)]
    event_time: Column = "event_time"
    created_time: Column | None = None
    known_at: KnownAt | None = None
    ttl: Duration | None = None
    sql: Annotated[str, Field(max_length=100_000)] | None = None
    aggregations: Annotated[tuple[Aggregation, ...], Field(max_length=200)] = ()
    only: Annotated[tuple[Jurisdiction, ...], Field(min_length=1)] | None = None
    classes: tuple[DataClass, ...] = ()
    invalid_rows: InvalidRows = InvalidRows.REFUSE
    max_invalid_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    max_ahead: Duration | None = None
    unique: bool = False
    freshness: Duration | None = None

    @property
    def features(self) -> tuple[Feature, ...]:
        types = {column.name: column.type for column in self.columns}
        return tuple(each.feature_of(types.get(each.column)) for each in self.aggregations) or self.columns

    @property
    def own_label(self) -> Label:
        """The label of the view and those of its columns: whoever reads the view reads all of them."""
        only = None if self.only is None else frozenset(self.only)
        own = Label(only=only, classes=frozenset(self.classes))
        return union([own, *(column.label for column in self.columns)])

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        moments = [self.event_time] + ([self.created_time] if self.created_time else [])
        stored = [column.name for column in self.columns] + moments
        for names in (stored, [feature.name for feature in self.features] + moments):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"columns are named once: {', '.join(sorted(twice))}")
        if self.known_at is not None and (self.known_at is KnownAt.CREATED_TIME) != bool(self.created_time):
            raise ValueError("known_at is created_time where there is a created_time column, and only there")
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

    @property
    def known_at(self) -> KnownAt:
        """What says when a row was known. The definition of a stored view states it."""
        return self.definition.known_at or KnownAt.EVENT_TIME


class ChangeKind(StrEnum):
    NEW = "new"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


class KeepRows(StrEnum):
    """Which rows a new version of a view takes over from the last one.

    `compatible`: those that fit its definition, if its SQL is the same; `all`: also those of another SQL; `none`.
    """

    COMPATIBLE = "compatible"
    ALL = "all"
    NONE = "none"


class PlannedChange(Record):
    """The planned change of a definition. `differences` are the fields that are new in this version of a view.

    `kept_rows` are those that it takes over from the last version, if that has any; `notes` say what becomes of them.
    """

    kind: Literal["entity", "view"]
    name: str
    change: ChangeKind
    version: int | None = None
    differences: tuple[str, ...] = ()
    kept_rows: int | None = None
    notes: tuple[str, ...] = ()


class ApplyResult(Record):
    """The result of applying definitions: new entities, the views as they are now, and each change."""

    entities: tuple[str, ...]
    views: tuple[StoredView, ...]
    changes: tuple[PlannedChange, ...] = ()


class TableCleanup(Record):
    """The number of table files and of folders of killed queries that were removed."""

    files: int
    spilled: int


class IngestResult(Record):
    """The rows of a view after an ingestion. `notes` say what was assumed to read the uploaded ones.

    `known_from` is when the added rows became known, where that is when they came in. If the same upload had been added
    before, nothing is added, and `already_since` says when that was. Invalid rows that were `quarantined` are in
    `batch`; `rules` are those they break.
    """

    view: ObjectId
    version: int
    table_version: int
    added: int
    rows: int
    known_from: datetime | None = None
    notes: tuple[str, ...] = ()
    already_since: datetime | None = None
    quarantined: int = 0
    batch: str | None = None
    rules: tuple[BrokenRule, ...] = ()


class QuarantinedBatch(Record):
    """The rows of one file that were set aside. `rows` are left, of `quarantined` at first; they break `rules`.

    `version` is that of the view at the time. `file` is the uploaded blob, empty if the reader may not see it; `sha256`
    is that of its bytes.
    """

    id: ObjectId
    name: str
    view: ObjectId
    version: int
    file: str
    sha256: str
    by: str
    at: datetime
    rows: int
    quarantined: int
    ingested: int
    discarded: int
    rules: tuple[BrokenRule, ...]


class BrokenValue(Record):
    """A rule that a row breaks, and the value that does, shortened; none if it is null."""

    rule: RowRule
    column: str
    value: str | None


class QuarantinedRow(Record):
    """A row as it came. `row` is its number in the file, from 1; with `sql`, in what that made of the file.

    `values` are shortened texts, in the order of the answer's `columns`.
    """

    row: int
    broken: tuple[BrokenValue, ...]
    values: tuple[str | None, ...]


class QuarantinedRows(Record):
    """A part of the rows of a batch; `next` asks for the part after it, none if this is the last."""

    columns: tuple[str, ...]
    items: tuple[QuarantinedRow, ...]
    next: str | None = None


class DiscardResult(Record):
    """The number of rows of a quarantined batch that were discarded."""

    batch: str
    discarded: int


class PinnedView(Record):
    """Exactly what a training set read of a view. `known_at` says what counted as known."""

    view: ObjectId
    version: int
    table_version: int
    known_at: KnownAt


def pin_of(view: StoredView) -> PinnedView:
    """Return the pinned version of `view` for reading its rows now."""
    return PinnedView(
        view=view.id, version=view.version, table_version=view.table_version or 0, known_at=view.known_at
    )


def _parsed(expression: str) -> str:
    parse(expression)
    return expression


Expression = Annotated[str, Field(max_length=MAX_CHARACTERS), AfterValidator(_parsed)]


class RequestFeature(Record):
    """A feature that is computed when a request arrives, from its inputs, looked up features and earlier ones of these.

    A training set has the column `name`, computed alike from the columns of its spine and from `view__feature`.
    `inputs` are the types of the names in the expression; the platform fills in those that it knows.
    """

    name: Column
    expression: Expression
    inputs: Annotated[dict[str, ColumnType], Field(max_length=200)] = {}


RequestFeatures = Annotated[tuple[RequestFeature, ...], Field(max_length=200)]


class TrainingSet(Record):
    """A spine with the features of some views as they were known at each row's time, and those computed from them.

    `spine_pin` says which rows the spine was, where it is a view. `notes` say what was assumed to read an uploaded one;
    only the answer that makes the set has them.
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
    request_features: tuple[RequestFeature, ...] = ()
    table_version: int
    rows: int
    created_at: datetime
    notes: tuple[str, ...] = ()


class ColumnOrigin(Record):
    """Where a column of a training set comes from: a column of a version of a view, columns of the set by an
    expression, or, without either, its spine. The name of a view is empty if the reader may not see it."""

    column: str
    view: str | None = None
    view_id: ObjectId | None = None
    view_version: int | None = None
    field: str | None = None
    expression: str | None = None


class InferredFeatures(Record):
    """An entity and a view that fit a file. `skipped` are its columns that no view can store."""

    entity: Entity
    view: FeatureView
    rows: int
    skipped: tuple[str, ...] = ()


class MaterializeResult(Record):
    """What was written online: the keys, those of them that have a new value, and the values that take effect later.

    `complete_until` is given if a key has more future values than are kept: materialize again before then.
    """

    view: ObjectId
    version: int
    table_version: int
    keys: int
    written: int
    ahead: int = 0
    complete_until: datetime | None = None


Value = int | float | bool | str | None
INFINITIES = {math.inf: "Infinity", -math.inf: "-Infinity"}
"""How JSON has them."""
_INFINITE = frozenset(INFINITIES)


class OnlineRow(Record):
    """The newest features of one key, in the order of the answer's `features`; none where unknown or too old."""

    key: str
    event_time: datetime | None
    values: tuple[Value, ...]

    @field_serializer("values", when_used="json")
    def _without_infinities(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """JSON has no infinities: they become texts."""
        if _INFINITE.isdisjoint(values):
            return values
        return tuple(INFINITIES.get(value, value) for value in values)  # type: ignore[arg-type]


class OnlineRows(Record):
    """Rows of a version of a view. `types` are those of its features: in JSON, an infinite float is a text.

    Values of rows from before `oldest` are too old, by the ttl of the view.
    """

    version: int
    features: tuple[str, ...]
    types: tuple[ColumnType, ...] = ()
    rows: tuple[OnlineRow, ...]
    oldest: datetime | None = None

    @field_validator("rows")
    @classmethod
    def _with_infinities(cls, rows: tuple[OnlineRow, ...], info: ValidationInfo) -> tuple[OnlineRow, ...]:
        """Restore the infinities of an answer that was sent as JSON."""
        floats = [n for n, kind in enumerate(info.data.get("types", ())) if kind is ColumnType.FLOAT]
        if not any(type(row.values[number]) is str for row in rows for number in floats):
            return rows
        return tuple(
            row.model_copy(
                update={
                    "values": tuple(
                        float(v) if n in floats and v is not None else v for n, v in enumerate(row.values)
                    )
                }
            )
            for row in rows
        )
