"""Requests for predictions, what was predicted, and its ground truth."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from falaj.records.names import ObjectId, Reference, RefersTo
from falaj.records.record import Record
from falaj.records.serving.lookups import MissingFeatures
from falaj.records.serving.tensors import Datatype, Finite, TensorName

PredictionRef = Annotated[Reference, RefersTo("predictions")]
"""A batch of predictions by its id, or one of them: `ID-12`, and `ID-12.3` for a row of a request with several."""


class PredictionBatch(Record):
    """Predictions that one version of an endpoint made within some seconds, stored together."""

    id: ObjectId
    endpoint: ObjectId
    version: str
    rows: int
    size_bytes: int
    created_at: datetime


class AnnouncedPredictions(Record):
    """How many events told of predictions, and of how many rows."""

    events: int = 0
    rows: int = 0


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
