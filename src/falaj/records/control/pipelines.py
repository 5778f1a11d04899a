"""Retraining: what a pipeline does, how a challenger is tried beside the champion, and the verdict."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from falaj.records.control.predictions import PipelinePrediction
from falaj.records.features import RequestFeatures
from falaj.records.names import Name, ObjectId, Reference, RefersTo
from falaj.records.optimization import Recipe
from falaj.records.record import Record
from falaj.records.registry import AliasName
from falaj.records.serving.statistics import VersionStats
from falaj.records.training.jobs import JobSpec

PipelineRef = Annotated[Reference, RefersTo("pipeline")]
Span = Annotated[timedelta, Field(ge=timedelta(seconds=1), le=timedelta(days=3650))]

Share = Annotated[float, Field(ge=0, le=1)]

Cause = Literal["person", "drift", "schedule"]
"""The trigger of a retraining."""


class Canary(Record):
    """The canary of a challenger: its share of the requests in percent, the margins, and the risks of a wrong verdict.

    The margins: its error rate may be higher by `error_rate`, the share of its requests that are slower than the
    champion's p95 by `latency` (a margin of 1: not judged), its score by `tolerance` of the champion's (`labels` = 0:
    not judged). It is promoted when every metric is shown to be within its margin, after at least `requests` requests
    and `labels` labelled requests of both; one that is beyond a margin is promoted with a probability of
    `false_promotion` at most. It is rolled back when it is shown to be worse; one that is not worse is rolled back with
    a probability of `false_rollback` at most, in all metrics and looks together. What is undecided after `longest`
    leaves the champion where it is.
    """

    share: Annotated[int, Field(ge=1, le=50)] = 10
    requests: Annotated[int, Field(ge=10, le=10_000_000)] = 500
    labels: Annotated[int, Field(ge=0, le=10_000_000)] = 200
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    latency: Annotated[float, Field(ge=0, le=1)] = 0.05
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.05
    score_bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Larger scores count as this; none: the largest log loss there is, or ten times the champion's squared error."""
    false_rollback: Annotated[float, Field(gt=0, le=0.5)] = 0.01
    false_promotion: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    longest: Span = timedelta(days=1)

    @model_validator(mode="after")
    def _judges_something(self) -> Self:
        if self.error_rate == 1 and self.latency == 1 and self.labels == 0:
            raise ValueError(
                "at least one of error_rate, latency (less than 1) and labels (more than 0) is judged"
            )
        return self


class CanaryTraffic(Record):
    """What a canary is planned for; what is not given is taken from what the endpoint answered in the last day.

    `labelled` is the share of requests that get a label, `slow_share` that of the champion's requests above the bound
    of slow ones (next below its p95).
    """

    requests_per_hour: Annotated[float, Field(gt=0, le=1e9)] | None = None
    labelled: Share | None = None
    error_rate: Share | None = None
    slow_share: Share | None = None
    score_mean: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    score_variance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class PipelineOptimization(Record):
    """Which variants of a new version are tried before it is served, and what they are judged by."""

    recipes: Annotated[tuple[Recipe, ...], Field(min_length=1)] = ("int8",)
    target: str
    features: tuple[str, ...] = ()


class Pipeline(Record):
    """Training set, job, model, canary: what a retraining goes through.

    The training set has the rows of the view `spine` from the last `window` before its newest one, joined with
    `views`, and with the columns `request_features` computed; the job finds it as the input `training`, and leaves
    `model.json` behind (fj.save_model writes it). The new version is tried on `endpoint`, and becomes `alias` if the
    verdict is good. It is started by drift on the endpoint (`on_drift`, not again within `rest`), after `every`, or by
    a person. Once it is promoted it predicts the rows of `predicting`.
    """

    name: Name
    endpoint: Name
    model: Name
    alias: AliasName = "champion"
    spine: Name
    window: Span
    views: Annotated[tuple[Name, ...], Field(min_length=1, max_length=50)]
    request_features: RequestFeatures = ()
    job: JobSpec
    optimizing: PipelineOptimization | None = None
    predicting: PipelinePrediction | None = None
    canary: Canary = Canary()
    on_drift: bool = True
    rest: Span = timedelta(hours=1)
    every: Span | None = None
    approval_within: Span = timedelta(days=7)


class StoredPipeline(Record):
    """A pipeline as it stands, and its last start."""

    id: ObjectId
    workspace: ObjectId
    definition: Pipeline
    code: ObjectId | None = None
    applied_by: str
    started_at: datetime | None = None
    cause: Cause | None = None
    work: ObjectId | None = None
    verdict: str | None = None
    """How the canary of its last start ended; none before."""
    created_at: datetime


class CanaryOutcome(StrEnum):
    """How a canary ends. `undecided` keeps the champion, and says nothing against the challenger."""

    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    UNDECIDED = "undecided"


Metric = Literal["error_rate", "latency", "score"]


class MetricEvidence(Record):
    """What a canary has seen of one metric: less is better in each.

    `compared` values of the challenger were compared with the champion's at the same time. `champion` and `challenger`
    are the means of those; `margin` is how much higher the challenger's may be. `worse` and `within` are the e-values
    for "it is worse" and "it is within the margin": each decides at its `…_needed`. `more` is about how many more
    compared values a decision takes, if the difference stays as it is; none if it is decided, or nothing was seen.
    """

    metric: Metric
    compared: int
    champion: float | None
    challenger: float | None
    margin: float | None
    worse: float
    worse_needed: float
    within: float
    within_needed: float
    more: int | None = None


class CanaryVerdict(Record):
    """The verdict of a canary, with its evidence. `promote` says whether the challenger takes over."""

    outcome: CanaryOutcome
    promote: bool
    words: str
    champion: VersionStats | None = None
    challenger: VersionStats | None = None
    evidence: tuple[MetricEvidence, ...] = ()


class EvidencePoint(MetricEvidence):
    """What a canary had seen of one metric at one time; the difference of the means lies from `low` to `high`.

    That is an approximate confidence sequence: it is right at all times at once, but for the risk of a false promotion.
    """

    low: float | None = None
    high: float | None = None


class CanaryPoint(Record):
    """The evidence after one observation; `requests` and `labels` are the challenger's."""

    number: int
    at: datetime
    requests: int
    labels: int
    metrics: tuple[EvidencePoint, ...]


class CanaryProgress(Record):
    """How versions compare that answer side by side, and the verdict on the last canary that `ended`.

    `work` is the canary that is under way; without one, versions that share the requests are compared by the default
    plan. Without two versions that answer, only `ended` is there.
    """

    endpoint: str
    work: ObjectId | None = None
    plan: Canary | None = None
    champion: str | None = None
    challenger: str | None = None
    since: datetime | None = None
    outcome: CanaryOutcome | None = None
    words: str = ""
    evidence: tuple[MetricEvidence, ...] = ()
    points: tuple[CanaryPoint, ...] = ()
    ended: CanaryVerdict | None = None


class CanaryForecast(Record):
    """What a metric's verdict takes for a challenger that is worse by `worse_by`: the likely first verdict.

    `after` is the expected number of the challenger's requests (for a score: of its labelled requests), `requests` the
    number of the endpoint's, `takes` the time at the given traffic. `power` is the probability that it comes within the
    longest time of the canary. All are none where there is no verdict to expect, or the traffic is unknown.
    """

    metric: Metric
    champion: float
    margin: float
    worse_by: float
    outcome: CanaryOutcome
    after: int | None = None
    requests: int | None = None
    takes: timedelta | None = None
    power: float | None = None


class CanaryPlan(Record):
    """How soon a canary decides, by metric and by how much worse the challenger is; and what was assumed."""

    endpoint: str
    canary: Canary
    traffic: CanaryTraffic
    assumed: tuple[str, ...] = ()
    """Figures of the traffic that were neither given nor seen, so that a typical one was taken."""
    forecasts: tuple[CanaryForecast, ...]
