"""Retraining: what a pipeline does, how a challenger is tried beside the champion, and the verdict."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.names import Name, ObjectId, Reference, RefersTo
from falaj.records.record import Record
from falaj.records.registry import AliasName
from falaj.records.serving import VersionStats
from falaj.records.training.jobs import JobSpec

PipelineRef = Annotated[Reference, RefersTo("pipeline")]
Span = Annotated[timedelta, Field(ge=timedelta(seconds=1), le=timedelta(days=3650))]

Cause = Literal["person", "drift", "schedule"]
"""The trigger of a retraining."""


class Canary(Record):
    """The canary of a challenger: its share of the requests in percent, and the minimum of data for a verdict.

    Both versions must have answered `requests` requests, and have `labels` predictions whose outcome is known (0: the
    score is not judged). The challenger is rolled back if its error rate exceeds the champion's by more than
    `error_rate`, or if it cannot be shown that its score is worse by less than `tolerance` of the champion's. What is
    undecided after `longest` is rolled back.
    """

    share: Annotated[int, Field(ge=1, le=50)] = 10
    requests: Annotated[int, Field(ge=10, le=10_000_000)] = 500
    labels: Annotated[int, Field(ge=0, le=10_000_000)] = 200
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.02
    longest: Span = timedelta(days=1)


class PipelineOptimization(Record):
    """Which variants of a new version are tried before it is served, and what they are judged by."""

    recipes: Annotated[tuple[Literal["onnx", "int8"], ...], Field(min_length=1)] = ("int8",)
    target: str
    features: tuple[str, ...] = ()


class Pipeline(Record):
    """Training set, job, model, canary: what a retraining goes through.

    The training set has the rows of the view `spine` from the last `window` before its newest one, joined with
    `views`; the job finds it as the input `training`, and leaves `model.json` behind (fj.save_model writes it). The new
    version is tried on `endpoint`, and becomes `alias` if the verdict is good. It is started by drift on the endpoint
    (`on_drift`, not again within `rest`), after `every`, or by a person.
    """

    name: Name
    endpoint: Name
    model: Name
    alias: AliasName = "champion"
    spine: Name
    window: Span
    views: Annotated[tuple[Name, ...], Field(min_length=1, max_length=50)]
    job: JobSpec
    optimizing: PipelineOptimization | None = None
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
    created_at: datetime


class CanaryVerdict(Record):
    """The verdict of a canary. `worse_by` is the challenger's mean score less the champion's: less is better."""

    promote: bool
    words: str
    champion: VersionStats
    challenger: VersionStats
    worse_by: float | None = None
    uncertainty: float | None = None
