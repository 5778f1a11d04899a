"""Batch predictions: what a run reads, keeps and writes, how far it is, and what came of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from falaj.records.names import Name, ObjectId
from falaj.records.record import Record
from falaj.records.registry import FeatureName, FileFormat, FilePath, TensorSpec
from falaj.records.serving.settings import Device

EVERYTHING = "*"
"""In `keep`: all columns of the input."""

Columns = Annotated[tuple[FeatureName, ...], Field(max_length=900)]
"""Each may be an argument of a job, which takes 1000."""
Prefix = Annotated[str, Field(max_length=64)]
ThreadCount = Annotated[int, Field(ge=1, le=1024)]


class PredictionColumns(Record):
    """The columns of a batch prediction.

    `features` are the columns that the model takes, in order, where its signature does not name them. `keep` are the
    columns of the input that are written beside the predictions: by default those that the model does not take; `*` is
    all. `outputs` are the outputs of the model to write, by default all, each under its name behind `prefix`.
    """

    features: Columns = ()
    keep: Columns | None = None
    outputs: Columns = ()
    prefix: Prefix = ""


class AccompanyingFile(Record):
    """A file of a version beside its model, which Python code may read."""

    path: FilePath
    sha256: str


class PredictionStep(Record):
    """The file of a version that is a step of an ensemble."""

    version: ObjectId
    file: FilePath
    sha256: str


class PredictionRun(Record):
    """A run in a process without keys: the file of a verified model version with its signature, input and columns.

    A job leaves `source` open: it finds its input by name. With `is_staged` the input is a copy that each attempt at a
    job makes anew: it is known by its bytes, not by its path and age. `steps` are the versions of an ensemble. Where a
    model is evaluated, `target` is the column that it is to predict, and must not be given.
    """

    model: str
    file: FilePath
    sha256: str
    format: FileFormat = FileFormat.ONNX
    tensors: Annotated[tuple[TensorSpec, ...], Field(max_length=1000)] = ()
    outputs: Annotated[tuple[TensorSpec, ...], Field(max_length=1000)] = ()
    steps: Annotated[tuple[PredictionStep, ...], Field(max_length=32)] = ()
    others: Annotated[tuple[AccompanyingFile, ...], Field(max_length=1000)] = ()
    columns: PredictionColumns = PredictionColumns()
    target: FeatureName | None = None
    source: str = ""
    is_staged: bool = False
    to_delta: bool = False
    threads: ThreadCount | None = None
    device: Device = "auto"
    restart: bool = False


class PredictionProgress(Record):
    """How far a run is. `resumed` rows were done by an earlier run."""

    rows: int
    total: int
    resumed: int = 0


class PredictionSummary(Record):
    """A finished run: its rows, how many an earlier run had done, the columns of the output, and what it took."""

    rows: int
    resumed: int = 0
    columns: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class PipelinePrediction(Record):
    """The view whose rows a pipeline predicts with the version that it has promoted, and where to.

    The predictions become a blob called `name` and the end of the workflow's id; `into` is a view that they are added
    to.
    """

    view: Name
    name: Annotated[Name, Field(max_length=100)]
    columns: PredictionColumns = PredictionColumns()
    into: Name | None = None


class BatchPrediction(Record):
    """Predictions that a job made: their blob, and the view that they were added to."""

    blob: ObjectId
    name: str
    job: ObjectId
    view: ObjectId | None = None
