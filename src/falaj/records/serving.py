"""Endpoints, their weighted routes, the models that they serve, and what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from falaj.records.governance.residency import Label
from falaj.records.names import Name, ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record
from falaj.records.registry import FileFormat

EndpointRef = Annotated[Reference, RefersTo("endpoint")]
PredictionRef = Annotated[Reference, RefersTo("predictions")]
"""A batch of predictions by its id, or one of them: `ID-12`, and `ID-12.3` for a row of a request with several."""

DYNAMIC = -1
"""A dimension that each request chooses."""


class Datatype(StrEnum):
    """The tensor types of the Open Inference Protocol that we serve."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"


class Tensor(Record):
    """An input or output of a model; -1 in `shape` is a dimension that each request chooses."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype} {list(self.shape)})"


class ServedModel(Record):
    """One version of a model as it is served: its inputs and outputs, in the model's order."""

    name: Reference
    version: Name
    platform: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


Sha256 = Annotated[str, TextRule("[0-9a-f]{64}", "a SHA-256 is 64 hexadecimal digits", limit=64)]


RowCount = Annotated[int, Field(ge=1, le=4096)]
RunCount = Annotated[int, Field(ge=1, le=64)]
DelayMs = Annotated[float, Field(ge=0, le=1000)]
QueueMs = Annotated[float, Field(ge=1, le=600_000)]
TimeoutMs = Annotated[float, Field(ge=1, le=600_000)]
RequestRate = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
BurstSize = Annotated[int, Field(ge=1, le=1_000_000)]
Device = Literal["auto", "cpu", "gpu"]
EngineName = Literal["auto", "openvino", "triton"]


class ServingSettings(Record):
    """How the versions of an endpoint run. What is not given is found by measurement when a model is loaded."""

    max_batch_rows: RowCount | None = None
    """Rows of the largest batch; 1 runs each request alone."""
    batch_delay_ms: DelayMs | None = None
    """How long a batch that is not full waits for more requests; by default not at all."""
    max_queue_ms: QueueMs | None = None
    """How long a request may wait before it is refused."""
    instances: RunCount | None = None
    """Runs at a time; by default one for each core."""
    threads: RunCount | None = None
    """Threads of one run; by default 1."""
    timeout_ms: TimeoutMs | None = None
    """How long a run may take; by default a minute."""
    engine: EngineName | None = None
    """What runs versions; by default, or with auto, what their format says. OpenVINO runs ONNX files; Triton is the
    server of `serving.triton`, which has the version in its repository."""
    device: Device | None = None
    """Where versions run; by default, or with auto, on a GPU if the engine finds one."""
    compiled: bool | None = None
    """Whether torch compiles the program of a version when it loads it; by default not."""
    requests_per_second: RequestRate | None = None
    """Requests of each caller; by default `serving.limits`."""
    burst: BurstSize | None = None
    """Requests that a caller who has been idle may send at once; by default those of a second."""

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> Self:
        if self.burst is not None and self.requests_per_second is None:
            raise ValueError("burst needs requests_per_second")
        return self

    @property
    def of_runs(self) -> ServingSettings:
        """Return what matters to a loaded model: all but the limits of callers."""
        return self.model_copy(update={"requests_per_second": None, "burst": None})


class MeasuredVersion(Record):
    """How the model server runs a version, and what it measured when it loaded it."""

    version: Name
    run_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """A run with one row."""
    row_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """What each further row of a batch adds."""
    batch_rows: Annotated[int, Field(ge=1)]
    """Rows of the largest batch; 1: requests do not share runs."""
    instances: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)]
    max_queue_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """How long a request may wait while the model is not overloaded."""
    place: Literal["event loop", "threads", "process"]
    """Where it runs: a quick one on the event loop, a slow one in threads, an unbounded one in its own process."""


class ServedFile(Record):
    """The source of a model version's bytes: a registered version, or a file that must hash to `sha256`.

    `features` are what the columns of its input are called, in their order; none where nobody said. `inputs` and
    `outputs` are the registered signature of a version whose format does not tell their names.
    """

    model: Reference
    version: Name
    registered: ObjectId | None = None
    path: Path | None = None
    sha256: Sha256 | None = None
    format: FileFormat = FileFormat.ONNX
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    features: tuple[str, ...] = ()
    settings: ServingSettings = ServingSettings()


VersionName = Annotated[
    str,
    TextRule(
        r"([a-z0-9][a-z0-9._-]*@)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?",
        "a version is its number, or like churn@14",
        limit=200,
    ),
]
TensorName = Annotated[str, Field(min_length=1, max_length=256)]


Finite = Annotated[float, Field(allow_inf_nan=False)]


Percent = Annotated[int, Field(ge=0, le=100)]

StickyKey = Annotated[
    str,
    TextRule(
        r"request|header|(parameter|input):[^\s:]{1,200}",
        "the key is request (the id of the request), header (Falaj-Key), parameter:NAME or input:NAME",
        limit=210,
    ),
]
"""Where the key of a request is that decides about its version."""

SHADOW = ".shadow"
"""Ends the version of whatever is counted, logged or watched of a shadow, so that it does not mix with answers."""


class Route(Record):
    """A version's share of an endpoint's requests; with weight 0 it answers only whoever asks for it by version.

    A `shadow` gets copies of so many percent of the requests, and never answers. The `fallback` answers where the
    version that was chosen by weight fails or is overloaded.
    """

    version: VersionName
    weight: Annotated[int, Field(ge=0, le=1000)] = 100
    shadow: Percent = 0
    fallback: bool = False

    @model_validator(mode="after")
    def _shadow_answers_nothing(self) -> Self:
        if self.shadow and (self.weight or self.fallback):
            raise ValueError("a shadow never answers: its weight must be 0, and it cannot be the fallback")
        return self


MissingRule = Finite | Literal["reject", "impute"] | None
"""What becomes of a feature without a value: a number; the request is rejected; the stored value; none: NaN."""


class ViewLookup(Record):
    """Features of `view`, by the key in the request's inputs `keys`; unless given, those named like its key columns.

    A model calls them `name__feature`, where `name` is the view's unless given. `missing` is the rule for features of
    this view without a value, unless it is that of the lookup. Values older than `max_age` count as missing.
    """

    view: Reference
    keys: Annotated[tuple[TensorName, ...], Field(max_length=8)] = ()
    name: Name | None = None
    features: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Which features the view has; the platform fills this in."""
    key_types: Annotated[tuple[Datatype, ...], Field(max_length=8)] = ()
    """The types of `keys` in a request; the platform fills this in."""
    missing: MissingRule = None
    max_age: Annotated[timedelta, Field(gt=timedelta(0))] | None = None


class Lookup(Record):
    """The assembly of a model's one input from feature views and the request's other inputs.

    Its columns are `features`, in the model's order (none: as the version says). Each comes from the view that has it,
    else from the request's input of that name. A feature that is not known gets its value in `defaults`, by its name
    among the model's columns; without one, the rule of its view decides, else `missing`: a number (none: NaN), the
    value in `imputed`, such as the mean of the training set, or the request is rejected. A feature of the request that
    has a default may be left out.
    """

    views: Annotated[tuple[ViewLookup, ...], Field(min_length=1, max_length=50)]
    features: Annotated[tuple[TensorName, ...], Field(max_length=10_000)] = ()
    missing: MissingRule = None
    defaults: Annotated[dict[TensorName, Finite], Field(max_length=10_000)] = {}
    imputed: Annotated[dict[TensorName, Finite], Field(max_length=10_000)] = {}


class Endpoint(Record):
    """A name that callers use, and the versions of `model` that answer for it. `id` is its object, if it has one."""

    name: Reference
    model: Reference
    routes: Annotated[tuple[Route, ...], Field(min_length=1)]
    lookup: Lookup | None = None
    id: ObjectId | None = None
    sticky: StickyKey | None = None
    settings: ServingSettings = ServingSettings()

    @model_validator(mode="after")
    def _routes_hold(self) -> Self:
        _once("a version", (route.version for route in self.routes))
        _once("a fallback", ("fallback" for route in self.routes if route.fallback))
        if not any(route.weight for route in self.routes):
            raise ValueError(f"no route of {self.name} has a weight; at least one is more than 0")
        return self


class Deployment(Record):
    """The models that one model server serves."""

    models: tuple[ServedFile, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()

    @model_validator(mode="after")
    def _routes_lead_somewhere(self) -> Self:
        _once("an endpoint", (endpoint.name for endpoint in self.endpoints))
        known = {(file.model, file.version, file.settings) for file in self.models}
        if len(known) < len(self.models):
            _once("a model version", (f"{file.model}@{file.version}" for file in self.models))
        for endpoint in self.endpoints:
            for route in endpoint.routes:
                if (endpoint.model, route.version, endpoint.settings.of_runs) not in known:
                    raise ValueError(
                        f"{endpoint.name} routes to {endpoint.model}@{route.version}, which has no file"
                    )
        return self


class ScoringRule(StrEnum):
    """The distance of a prediction from the ground truth; less is better in both."""

    LOG_LOSS = "log_loss"
    SQUARED_ERROR = "squared_error"


Routes = Annotated[tuple[Route, ...], Field(min_length=1, max_length=20)]


class ServedRoute(Record):
    """A route as it is: the version's object, and why it is not served, if it is not."""

    version: str
    weight: int
    shadow: int = 0
    fallback: bool = False
    id: ObjectId
    problem: str | None = None


class DeployedEndpoint(Record):
    """An endpoint. `url` is where the model server answers for it; `previous` are the routes before the last change."""

    id: ObjectId
    workspace: ObjectId
    name: str
    model: str
    routes: tuple[ServedRoute, ...]
    previous: tuple[Route, ...] = ()
    lookup: Lookup | None = None
    sticky: StickyKey | None = None
    """Where the key is that decides about the version; none: the id of the request, else nothing."""
    settings: ServingSettings = ServingSettings()
    measured: tuple[MeasuredVersion, ...] = ()
    """How the model server runs each version that it has loaded."""
    scoring: ScoringRule | None = None
    zone: str = ""
    label: Label
    url: str | None = None
    grpc: str | None = None
    """Where the model server speaks gRPC, and the model's name there, like `127.0.0.1:7483 acme/churn`."""
    protected: str | None = None
    """The alias for which every version that it serves must be approved; none if it is not protected."""
    unlogged: int = 0
    """Predictions that were answered, but could not be logged."""
    problem: str | None = None
    """What keeps the model server, and so every version, from being reached."""
    created_at: datetime
    changed_at: datetime


class VersionCounts(Record):
    """The counts of one version since the last report; `latency` counts by bucket, `lost` was not logged."""

    version: Name
    requests: Annotated[int, Field(ge=0)] = 0
    errors: Annotated[int, Field(ge=0)] = 0
    rows: Annotated[int, Field(ge=0)] = 0
    latency: Annotated[tuple[int, ...], Field(max_length=64)] = ()
    lost: Annotated[int, Field(ge=0)] = 0


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


class LoadProblem(Record):
    """Why a version is not served; none if it is."""

    version: Name
    problem: Annotated[str, Field(max_length=4000)] | None = None


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


class PredictionBatch(Record):
    """Predictions that one version of an endpoint made within some seconds, stored together."""

    id: ObjectId
    endpoint: ObjectId
    version: str
    rows: int
    size_bytes: int
    created_at: datetime


class PredictionRecord(Record):
    """One answered row: who asked which version, what went in, what came out, and what came true.

    JSON has neither NaN nor infinities: there they are the texts NaN, Infinity and -Infinity, and not null.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    id: str
    endpoint: str
    model: str
    version: str
    caller: str
    request: str
    at: datetime
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    shadow: bool = False
    """Made by a shadow, and never sent; `request` is the prediction that answered the request."""
    label: float | None = None
    score: float | None = None


class GroundTruth(Record):
    """The ground truth of a prediction: a number, or 0 or 1 for a class."""

    id: PredictionRef
    value: Finite


class FeedbackResult(Record):
    """The number of labels stored; `unknown` predictions are not logged, or not yet: send them again later.

    `unscored` labels are stored without a score: what was predicted is not a finite number.
    """

    stored: int
    replaced: int
    unknown: tuple[str, ...] = ()
    unscored: tuple[str, ...] = ()


class InferInput(Record):
    """A tensor of a request: its values are flat, or nested in its shape."""

    name: TensorName
    shape: Annotated[tuple[int, ...], Field(max_length=32)]
    datatype: Datatype
    data: list[Any]


class InferOutput(Record):
    """An output tensor; `not_finite` of its values are NaN or infinite, and null in `data`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any]
    not_finite: int = 0


class MissingReason(StrEnum):
    """Why a feature has no value: no row of the key, a row older than the view's ttl or than the endpoint allows, null
    in the row, or not materialized with the view's newest version."""

    UNKNOWN_KEY = "unknown_key"
    EXPIRED = "expired"
    STALE = "stale"
    NULL = "null"
    NOT_ONLINE = "not_online"


class MissingFeatures(Record):
    """Features that a lookup did not find for a row of a request; the model got the endpoint's defaults for them."""

    row: int
    view: str
    key: str
    reason: MissingReason
    features: tuple[str, ...]


class InferenceResult(Record):
    """The answer of a version; `prediction` is the id for feedback.

    `missing` lists what the feature lookup did not find, `missing_rows` counts the rows that lack a feature: of many,
    only the first are listed.
    """

    model_name: str
    model_version: str
    id: str
    prediction: str | None = None
    outputs: tuple[InferOutput, ...]
    missing: tuple[MissingFeatures, ...] = ()
    missing_rows: int = 0
    feature_age_s: float | None = None
    """The age in seconds of the oldest feature that was looked up for it."""
    fallback_from: str | None = None
    """The version that was chosen and failed, so that the fallback answered."""
    fallback_reason: str | None = None
    """The code of its error."""


def _once(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what} stands once in the list; given twice: {', '.join(twice)}")
