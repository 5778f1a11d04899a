"""Runs of experiments: what was tried, with which parameters, and what was measured. Names as in MLflow."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, FiniteFloat, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, core_schema

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record

BATCH_POINTS = 10_000
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_KEY = r"[\w./ :-]"
_TEXT = r"[^\x00]"
_PART = r"(?!\.{1,2}(?:/|$))[^/\\\x00-\x1f\x7f]+"
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"

ExperimentRef = Annotated[Reference, RefersTo("experiment")]
RunRef = Annotated[Reference, RefersTo("run")]

Key = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=f"^{_KEY}+$")]
"""The name of a parameter, metric or tag: letters, digits, '_', '-', '.', '/', ':' and spaces."""
RunName = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=r"^[^\x00-\x1f\x7f]+$")]
ParamText = Annotated[str, StringConstraints(max_length=6000, pattern=f"^{_TEXT}*$")]
ParamValue = bool | Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | FiniteFloat | ParamText
"""Kept as text; a parameter is never changed."""
TagValue = Annotated[str, StringConstraints(max_length=5000, pattern=f"^{_TEXT}*$")]
Params = Annotated[dict[Key, ParamValue], Field(max_length=1000)]
Tags = Annotated[dict[Key, TagValue], Field(max_length=1000)]
Step = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
BatchId = Annotated[
    str, TextRule("[A-Za-z0-9_.:-]+", "a batch is A-Z, a-z, 0-9, '_', '.', ':' and '-'", limit=100)
]
ArtifactPath = Annotated[
    str, TextRule(f"{_PART}(?:/{_PART})*", "a path is relative, like plots/roc.png, without '..'", limit=500)
]
Condition = Annotated[
    str,
    TextRule(
        rf"metrics\.{_KEY}+?\s*(?:<=|>=|!=|=|<|>)\s*{_NUMBER}|(?:params|tags)\.{_KEY}+?\s*(?:!=|=)\s*{_TEXT}*",
        "a condition is like 'metrics.loss < 0.5', 'params.optimizer = adam' or 'tags.team != risk'",
        limit=6300,
    ),
]
"""Metrics are compared by their latest value. A run without the key meets no condition on it, not even '!='."""

Outcome = Literal["finished", "failed", "killed"]


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
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def ended(self) -> bool:
        return self is not RunStatus.RUNNING


class MetricPoint(Record):
    """One measurement. Without a timestamp it is of the moment when it arrives."""

    key: Key
    value: MetricValue
    step: Step = 0
    timestamp: AwareDatetime | None = None


Points = Annotated[tuple[MetricPoint, ...], Field(min_length=1, max_length=BATCH_POINTS)]


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


class Param(Record):
    key: str
    value: str


class Tag(Record):
    key: str
    value: str


class Artifact(Record):
    """A blob under a path of a run."""

    path: str
    blob: ObjectId
    size_bytes: int
    attached_at: datetime


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


class RunDetails(Record):
    """A run and everything that was logged to it; of the metrics the summaries, their history is `runs.metrics`."""

    run: Run
    params: tuple[Param, ...]
    tags: tuple[Tag, ...]
    metrics: tuple[Metric, ...]
    artifacts: tuple[Artifact, ...]
