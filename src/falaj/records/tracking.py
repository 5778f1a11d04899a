"""Experiments, runs and logged models: what was tried, with what, and what was measured. Names as in MLflow."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    Field,
    FiniteFloat,
    GetCoreSchemaHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Digested, Record, html_table

BATCH_POINTS = 10_000
HISTORY_POINTS = 25_000
"""Points in one page of a history."""
CURVE_POINTS = 5_000
"""Points of one downsampled curve, at most."""
VALUE_LENGTH = 16_000
"""Characters of a parameter or a tag."""
HTML_ROWS = 50
"""Rows of a table of a run in a notebook."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_KEY = r"[\w./ :-]"
_TEXT = r"[^\x00]"
_LINE = r"[^\x00-\x1f\x7f]"
_PART = r"(?!\.{1,2}(?:/|$))[^/\\\x00-\x1f\x7f]+"
_EXPERIMENT_RULE = "an experiment is 1 to 500 printable characters, and not the form of an id"

ExperimentName = Annotated[
    str, TextRule(rf"(?!experiment_[0-9a-z]{{26}}$)(?! ){_LINE}+(?<! )", _EXPERIMENT_RULE, limit=500)
]
"""Free text, as in MLflow. One with '/' or ':' is found by `experiments.find`, and otherwise named by its id."""
ExperimentText = Annotated[str, TextRule(rf"{_LINE}+", "an experiment is a name or an id", limit=500)]
ExperimentRef = Annotated[ExperimentText, RefersTo("experiment")]
RunRef = Annotated[Reference, RefersTo("run")]
LoggedModelRef = Annotated[Reference, RefersTo("logged_model")]

Key = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=f"^{_KEY}+$")]
"""The name of a parameter, metric or tag: letters, digits, '_', '-', '.', '/', ':' and spaces."""
Keys = Annotated[tuple[Key, ...], Field(min_length=1, max_length=1000)]
RunName = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=f"^{_LINE}+$")]
UserName = Annotated[str, StringConstraints(max_length=256, pattern=f"^{_LINE}*$")]
ValueText = Annotated[str, StringConstraints(max_length=VALUE_LENGTH, pattern=f"^{_TEXT}*$")]
ParamValue = bool | Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | FiniteFloat | ValueText
"""Kept as text; a parameter is never changed."""
Params = Annotated[dict[Key, ParamValue], Field(max_length=1000)]
Tags = Annotated[dict[Key, ValueText], Field(max_length=1000)]
ModelText = Annotated[str, StringConstraints(min_length=2, max_length=200_000, pattern=f"^{_TEXT}*$")]
"""The description of a model, as JSON."""
Step = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
BatchId = Annotated[
    str, TextRule("[A-Za-z0-9_.:-]+", "a batch is A-Z, a-z, 0-9, '_', '.', ':' and '-'", limit=100)
]
_PATH_RULE = "a path is relative, like plots/roc.png, without '..'"
ArtifactPath = Annotated[str, TextRule(f"{_PART}(?:/{_PART})*", _PATH_RULE, limit=500)]
ArtifactFolder = Annotated[str, TextRule(f"(?:{_PART}(?:/{_PART})*)?", f"empty, or {_PATH_RULE}", limit=500)]
FilterText = Annotated[str, StringConstraints(max_length=20_000, pattern=f"^{_TEXT}*$")]
"""A condition in MLflow's filter language, like "metrics.auc > 0.9 and params.lr = '0.1'"."""
OrderText = Annotated[str, StringConstraints(min_length=1, max_length=600, pattern=f"^{_TEXT}+$")]
"""What to sort by, like "metrics.auc DESC"."""
Orders = Annotated[tuple[OrderText, ...], Field(max_length=20)]

Outcome = Literal["finished", "failed", "killed"]
Lifecycle = Literal["active", "deleted", "all"]
"""Which objects a list has: those in use, those deleted but not removed for good yet, or both."""


class _Measured:
    """Marks a number that may be NaN or infinite; JSON has no word for those, so they travel as text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        words = core_schema.literal_schema(["NaN", "Infinity", "-Infinity"])
        return core_schema.union_schema(
            [core_schema.float_schema(), core_schema.no_info_after_validator_function(float, words)],
            mode="left_to_right",
            custom_error_type="measured",
            custom_error_message="a number, or one of the texts NaN, Infinity and -Infinity",
            serialization=core_schema.plain_serializer_function_ser_schema(_spelled, when_used="json"),
        )


def _spelled(value: float) -> float | str:
    if value != value:
        return "NaN"
    return value if abs(value) != float("inf") else "Infinity" if value > 0 else "-Infinity"


MetricValue = Annotated[float, _Measured()]


class RunStatus(StrEnum):
    SCHEDULED = "scheduled"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def ended(self) -> bool:
        return self not in (RunStatus.SCHEDULED, RunStatus.RUNNING)


DatasetName = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=f"^{_LINE}+$")]
DatasetDigest = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=f"^{_LINE}+$")]


class MetricPoint(Record):
    """One measurement. Without a timestamp it is of the moment when it arrives.

    `model` is the logged model that was measured, on the dataset of that name and digest; the newest value of each is
    shown with the model.
    """

    key: Key
    value: MetricValue
    step: Step = 0
    timestamp: AwareDatetime | None = None
    model: Reference | None = None
    dataset: DatasetName | None = None
    dataset_digest: DatasetDigest | None = None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The moments that a datetime can be, in microseconds since 1970: the years 1 to 9999."""
_key = TypeAdapter(Key)


class PointColumns(Digested):
    """Points of no model, as columns that were checked: quick to read and to store. Moments are in microseconds.

    For interfaces that take many points at a time; as an iterator it makes the records. See decision 0063.
    """

    __slots__ = ("keys", "moments", "steps", "values")

    def __init__(
        self, keys: Sequence[str], steps: Sequence[int], moments: Sequence[int], values: Sequence[float]
    ) -> None:
        self.keys, self.steps, self.moments, self.values = keys, steps, moments, values

    @classmethod
    def checked(
        cls, keys: Sequence[str], steps: Sequence[int], moments: Sequence[int], values: Sequence[float | str]
    ) -> PointColumns | None:
        """Return valid points, or None if they are not all plainly valid: as records they tell what is wrong."""
        if not 0 < len(keys) <= BATCH_POINTS or {*map(type, values)} != {float}:
            return None
        if min(steps) < INT64_MIN or max(steps) > INT64_MAX or min(moments) < _FIRST or max(moments) > _LAST:
            return None
        try:
            for key in {*keys}:
                _key.validate_python(key)
        except ValidationError:
            return None
        return cls(keys, steps, moments, values)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[MetricPoint]:
        for key, step, at, value in zip(self.keys, self.steps, self.moments, self.values, strict=True):
            yield MetricPoint(key=key, step=step, timestamp=_EPOCH + timedelta(microseconds=at), value=value)

    def digest(self) -> str:
        """Return a digest of the points, in their order."""
        size, keys = len(self), "\0".join(self.keys).encode()
        numbers = struct.pack(f"<{2 * size + 1}q{size}d", len(keys), *self.steps, *self.moments, *self.values)
        return hashlib.sha256(numbers + keys).hexdigest()


class _Points:
    """Reads points as records, of which there are `least` and more, or takes columns that were checked."""

    def __init__(self, *, least: int) -> None:
        self._least = least

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        records = Annotated[tuple[MetricPoint, ...], Field(min_length=self._least, max_length=BATCH_POINTS)]
        schema = handler.generate_schema(records)
        return core_schema.json_or_python_schema(
            schema, core_schema.no_info_wrap_validator_function(_read_points, schema)
        )


def _read_points(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    return given if type(given) is PointColumns else read(given)


Points = Annotated[tuple[MetricPoint, ...] | PointColumns, _Points(least=1)]
AnyPoints = Annotated[tuple[MetricPoint, ...] | PointColumns, _Points(least=0)]


class LogResult(Record):
    """The number of new values; the rest was stored already, with the same value."""

    run: ObjectId
    stored: int
    repeated: int = 0


class Metric(Record):
    """A metric in short. `last` has the highest step, there the latest timestamp, there the highest value.

    NaN is neither `low` nor `high`.
    """

    key: str
    points: int
    last: MetricValue
    last_step: int
    last_timestamp: datetime
    low: MetricValue | None = None
    high: MetricValue | None = None


class BatchResult(Record):
    """The number of new values of a batch; the rest was stored already, with the same value."""

    run: ObjectId
    metrics: int
    params: int
    tags: int
    repeated: int = 0


class HistoryPoint(Record):
    step: int
    timestamp: datetime
    value: MetricValue


class MetricHistory(Record):
    """Points of one metric of a run by step and time."""

    run: ObjectId
    key: str
    points: tuple[HistoryPoint, ...]


class MetricCurve(Record):
    """A metric for a plot: the first and last point, and of each stretch between the lowest and the highest one.

    `total` is the number of stored points in the range of steps.
    """

    run: ObjectId
    key: str
    total: int
    points: tuple[HistoryPoint, ...]


class Param(Record):
    key: str
    value: str


class Tag(Record):
    key: str
    value: str


class Artifact(Record):
    """A blob under a path of a run or of a logged model."""

    path: str
    blob: ObjectId
    size_bytes: int
    attached_at: datetime
    unsafe: bool | None = None
    """Whether its first bytes are those of a pickle; none where they were not looked at."""


class ArtifactEntry(Record):
    """A file or a folder among artifacts; a folder has no size.

    `unsafe`: it looks like a pickle, which runs code once it is loaded, by its name or by its first bytes.
    """

    path: str
    is_folder: bool = False
    blob: ObjectId | None = None
    size_bytes: int | None = None
    unsafe: bool = False


PREVIEW_ROWS, PREVIEW_COLUMNS = 200, 100


class ArtifactTable(Record):
    """The first rows of a table among artifacts, as text; `total_rows` is none where the file does not tell it."""

    path: str
    columns: Annotated[tuple[str, ...], Field(max_length=PREVIEW_COLUMNS)]
    rows: Annotated[tuple[tuple[str | None, ...], ...], Field(max_length=PREVIEW_ROWS)]
    total_rows: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None


class RemovedArtifacts(Record):
    """The paths of artifacts that were deleted."""

    paths: tuple[str, ...]


UploadRef = Annotated[Reference, RefersTo("upload")]
PartNumber = Annotated[int, Field(ge=1, le=10_000)]


class Upload(Record):
    """A file of a run or a logged model that arrives in parts."""

    id: ObjectId
    owner: ObjectId
    path: str


class UploadedPart(Record):
    """One part of an upload: its number, from 1, and the hash of its bytes."""

    number: PartNumber
    sha256: Annotated[str, TextRule("[0-9a-f]{64}", "a SHA-256 is 64 of 0-9 and a-f", limit=64)]


LongText = Annotated[str, StringConstraints(max_length=1_000_000, pattern=f"^{_TEXT}*$")]


class DatasetInput(Record):
    """A dataset that a run used; `context` is what for, such as training.

    Name and digest identify it within an experiment: where they are known, source, schema and profile stay as they are.
    """

    name: DatasetName
    digest: DatasetDigest
    source_type: Annotated[str, StringConstraints(max_length=64)] = "local"
    source: LongText = ""
    schema_text: LongText | None = None
    profile: LongText | None = None
    tags: Annotated[dict[Key, ValueText], Field(max_length=100)] = {}


class ModelLink(Record):
    """A logged model that a run read or made, and at which step."""

    model: Reference
    step: Step = 0


DatasetInputs = Annotated[tuple[DatasetInput, ...], Field(max_length=100)]
ModelLinks = Annotated[tuple[ModelLink, ...], Field(max_length=100)]


class Experiment(Record):
    """A group of runs. A deleted one keeps its name until it is removed for good."""

    id: ObjectId
    workspace: ObjectId
    name: str
    owner: str
    label: Label = UNRESTRICTED
    tags: tuple[Tag, ...] = ()
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = None


class Run(Record):
    """One try of an experiment. `label` is what flowed in from its sources."""

    id: ObjectId
    workspace: ObjectId
    experiment: ObjectId
    name: str
    status: RunStatus
    owner: str
    label: Label = UNRESTRICTED
    started_at: datetime
    ended_at: datetime | None = None
    parent: ObjectId | None = None
    user: str | None = None
    """Who ran it, where an importer or a client said so; otherwise it is the owner."""
    deleted_at: datetime | None = None


class ListedRun(Run):
    """A run in a list, with its parameters, tags and the newest value of each metric as far as they were asked for."""

    params: tuple[Param, ...] = ()
    tags: tuple[Tag, ...] = ()
    metrics: tuple[Metric, ...] = ()
    datasets: tuple[DatasetInput, ...] = ()
    models_read: tuple[ModelLink, ...] = ()
    models_made: tuple[ModelLink, ...] = ()


class RunDetails(Record):
    """A run and everything that was logged to it; of the metrics the summaries, their history is `runs.metrics`."""

    run: Run
    params: tuple[Param, ...]
    tags: tuple[Tag, ...]
    metrics: tuple[Metric, ...]
    artifacts: tuple[Artifact, ...]
    datasets: tuple[DatasetInput, ...] = ()
    models_read: tuple[ModelLink, ...] = ()
    models_made: tuple[ModelLink, ...] = ()

    def _repr_html_(self) -> str:
        """Return the run, its parameters, metrics and artifacts as HTML tables, for notebooks."""
        run = self.run
        facts = [("name", run.name), ("id", run.id), ("status", run.status), ("started", run.started_at)]
        facts += [(f"tag {each.key}", each.value) for each in self.tags]
        metrics = [(each.key, each.last, each.last_step, each.low, each.high) for each in self.metrics]
        tables = [html_table("Run", ("field", "value"), facts)]
        for title, names, rows in (
            ("Parameters", ("key", "value"), [(each.key, each.value) for each in self.params]),
            ("Metrics", ("key", "last", "step", "low", "high"), metrics),
            ("Artifacts", ("path", "bytes"), [(each.path, each.size_bytes) for each in self.artifacts]),
        ):
            tables += [html_table(title, names, rows[:HTML_ROWS])] if rows else []
        return "".join(tables)


RunParts = Literal["params", "tags", "metrics", "datasets", "models"]
"""What a list shows of each run beside the run itself."""

LoggedModelStatus = Literal["pending", "ready", "failed"]
ModelType = Annotated[str, StringConstraints(max_length=500, pattern=f"^{_LINE}*$")]


class ModelMetric(Record):
    """The newest value of a metric of a logged model, in one run and on one dataset."""

    key: str
    value: MetricValue
    step: int
    timestamp: datetime
    run: ObjectId
    dataset: str | None = None
    dataset_digest: str | None = None


class LoggedModel(Record):
    """A model that a run logged: files, parameters and metrics, before anyone registers it as a version."""

    id: ObjectId
    workspace: ObjectId
    experiment: ObjectId
    name: str
    status: LoggedModelStatus
    owner: str
    label: Label = UNRESTRICTED
    source_run: ObjectId | None = None
    type: str = ""
    params: tuple[Param, ...] = ()
    tags: tuple[Tag, ...] = ()
    metrics: tuple[ModelMetric, ...] = ()
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = None


class RunCleanup(Record):
    """How many deleted runs, logged models and experiments were removed for good, and expired uploads."""

    runs: int
    models: int = 0
    experiments: int = 0
    uploads: int = 0
    more: bool = False
