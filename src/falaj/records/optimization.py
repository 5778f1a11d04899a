"""Optimizations: variants of a model version, what was measured of each, and why it was accepted or refused."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.features import Column
from falaj.records.names import ObjectId, Reference, RefersTo
from falaj.records.record import Record
from falaj.records.registry import FilePath, TensorSpec

OptimizationRef = Annotated[Reference, RefersTo("optimization")]

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Words = Annotated[str, Field(max_length=4000)]
FeatureColumns = Annotated[tuple[Column, ...], Field(max_length=900)]
"""Each is an argument of the job, which takes 1000."""


Recipe = Literal["onnx", "int8", "fp16"]
"""The way to make a variant: ONNX with a fused graph, int8 weights, or half precision."""


class OptimizationVerdict(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"


class AcceptanceBudget(Record):
    """A variant must be `speedup` times as fast, and at most this share `worse` in log loss or RMSE."""

    speedup: Annotated[float, Field(ge=1, le=1000)] = 1.1
    worse: Annotated[float, Field(ge=0, le=10)] = 0.01


class Interval(Record):
    """A measured value, and the ends of its 95% bootstrap interval."""

    low: Number
    middle: Number
    high: Number


class Measurement(Record):
    """A model on this host, on one thread. `loss` is what the optimization's metric says."""

    latency_p50_us: Positive
    latency_p99_us: Positive
    rows_per_s_32: Positive
    rows_per_s_256: Positive
    cpu_us_per_row: Positive
    size_bytes: Annotated[int, Field(ge=0)]
    loss: Positive | None = None
    auc: Positive | None = None


Speedups = Annotated[dict[Annotated[str, Field(max_length=64)], Interval], Field(max_length=16)]


class Variant(Record):
    """One try. `speedup` is against the original, by size of batch; `worse` is the share by which its loss is higher.

    `version` is what it was registered as, once it was accepted.
    """

    recipe: Recipe
    verdict: OptimizationVerdict
    reason: Words
    measured: Measurement | None = None
    speedup: Speedups = {}
    worse: Interval | None = None
    file: FilePath | None = None
    inputs: Annotated[tuple[TensorSpec, ...], Field(max_length=100)] = ()
    outputs: Annotated[tuple[TensorSpec, ...], Field(max_length=100)] = ()
    version: Reference | None = None


class OptimizationReport(Record):
    """The report of the job: the original and its variants, measured side by side on `host`."""

    metric: Literal["log_loss", "rmse"]
    rows: Annotated[int, Field(ge=1)]
    skipped_rows: Annotated[int, Field(ge=0)] = 0
    host: Words = ""
    original: Measurement
    variants: Annotated[tuple[Variant, ...], Field(max_length=100)] = ()


class Optimization(Record):
    """An optimization that ended: of which version, judged on which data, within which budget, and what came of it."""

    id: ObjectId
    workspace: ObjectId
    model: str
    data: str
    target: str
    features: tuple[str, ...]
    budget: AcceptanceBudget
    job: ObjectId
    report: OptimizationReport
    created_at: datetime
