"""Models: versions that never change, and the aliases that point at them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.governance.identity import Appointment
from falaj.records.governance.residency import Label
from falaj.records.names import Name, ObjectId, PrincipalId, Reference, RefersTo, TextRule
from falaj.records.record import Record

ModelRef = Annotated[Reference, RefersTo("model")]
ModelVersionRef = Annotated[Reference, RefersTo("model_version")]
"""A version is named by its model and number, like `churn@14`, or by an alias that points at it: `churn@champion`."""

AliasName = Annotated[
    str,
    TextRule(
        r"[a-z][a-z0-9]*(\.[a-z0-9]+)*",
        "an alias is a-z, 0-9 and '.', starting with a letter, like champion",
        limit=64,
    ),
]
FilePath = Annotated[
    str,
    TextRule(
        r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*",
        "a path is names of letters, digits, '.', '_' and '-', joined by '/', like weights/model.onnx",
        limit=512,
    ),
]
FeatureName = Annotated[str, Field(min_length=1, max_length=256)]
Dimension = Annotated[int, Field(ge=-1, le=2**40)]
Metric = Annotated[float, Field(allow_inf_nan=False)]
MetricName = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=2000)]
CardText = Annotated[str, Field(max_length=200_000)]

Metrics = Annotated[dict[MetricName, Metric], Field(max_length=1000)]
Environment = Annotated[dict[MetricName, Text], Field(max_length=2000)]

Dtype = Literal[
    "bool",
    "string",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]


class FileFormat(StrEnum):
    """The format of a file, by its content."""

    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"
    SAFETENSORS = "safetensors"
    LITERT = "litert"
    XGBOOST = "xgboost"
    LIGHTGBM = "lightgbm"
    CATBOOST = "catboost"
    PYTHON = "python"
    ARROW = "arrow"
    PARQUET = "parquet"
    NUMPY = "numpy"
    JSON = "json"
    TEXT = "text"

    @property
    def is_model(self) -> bool:
        """Tell whether it can be served; the others accompany a model."""
        return self not in SIDE_FILES


SIDE_FILES = frozenset(
    {FileFormat.ARROW, FileFormat.PARQUET, FileFormat.NUMPY, FileFormat.JSON, FileFormat.TEXT}
)


class TensorSpec(Record):
    """One input or output of a model; -1 in `shape` is a dimension of any size, such as the batch.

    `features` are the names of its columns, in order, where they are known.
    """

    name: FeatureName
    dtype: Dtype
    shape: Annotated[tuple[Dimension, ...], Field(max_length=32)] = ()
    features: Annotated[tuple[FeatureName, ...], Field(max_length=10_000)] = ()


class ModelFile(Record):
    """One file of a version, and the blob that holds its bytes."""

    path: FilePath
    format: FileFormat
    blob: ObjectId
    size_bytes: int
    sha256: str


class ModelManifest(Record):
    """The signed manifest of a version, which never changes.

    The signature is Ed25519 by the key service over `falaj model manifest v1`, a newline and this record as canonical
    JSON. A bundle in the format of OpenSSF model signing can be made from it later: it has the same hashes.
    """

    platform: str
    workspace: ObjectId
    id: ObjectId
    model: ObjectId
    name: Name
    number: int
    format: FileFormat
    files: tuple[ModelFile, ...]
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    metrics: dict[str, float] = {}
    training_set: ObjectId | None = None
    run: ObjectId | None = None
    sources: tuple[ObjectId, ...] = ()
    environment: dict[str, str] = {}
    card: str = ""
    author: PrincipalId
    created_at: datetime

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ModelVersion(ModelManifest):
    """A version of a model. Its label is the one thing that may change: it follows its sources, and is not signed."""

    key: str
    signature: str
    label: Label


class Alias(Record):
    """An alias and its version. A protected one moves only to a version that was approved for it; if it is
    `independent`, by someone whom the version's authors did not appoint."""

    alias: str
    version: str | None
    protected: bool
    independent: bool = False
    since: datetime | None = None


class Model(Record):
    """A name, the number of its newest version, and its aliases."""

    id: ObjectId
    workspace: ObjectId
    name: str
    versions: int
    aliases: tuple[Alias, ...] = ()
    created_at: datetime


class AliasMove(StrEnum):
    """Why an alias moved."""

    PROMOTE = "promote"
    ROLLBACK = "rollback"
    PROTECT = "protect"
    """It stayed where it was, and was protected: no rollback leads to a version from before."""


class AliasChange(Record):
    """One move of an alias, numbered from 1."""

    seq: int
    alias: str
    version: str
    previous: str | None
    move: AliasMove
    by: str
    at: datetime


class Approval(Record):
    """`by` found `version` fit for `alias`, and for nothing else. A rollback from the version withdraws it.

    `appointment` is how `by` came to be an approver (None: by a policy, or it was not recorded then); `independent`:
    without the version's authors.
    """

    id: ObjectId
    version: str
    alias: str
    by: str
    comment: str
    at: datetime
    withdrawn_at: datetime | None = None
    appointment: Appointment | None = None
    independent: bool = False


class StandingApprovals(Record):
    """For which aliases a version is approved, for which of them independently, and for which no longer."""

    approved: frozenset[str] = frozenset()
    independent: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()


class Promotion(Record):
    """An alias that has moved, and on whose approval."""

    model: str
    change: AliasChange
    approved_by: tuple[str, ...] = ()


class VersionCheck(Record):
    """The progress of verifying a version's bytes and, once `finished`, the verdict."""

    version: str
    finished: bool
    ok: bool = False
    checked_bytes: int = 0
    size_bytes: int = 0
    problems: tuple[str, ...] = ()


class ExportTarget(StrEnum):
    """What a version is exported for."""

    TRITON = "triton"
    KSERVE = "kserve"
    EDGE = "edge"


StorageUri = Annotated[
    str,
    TextRule(
        r"(gs|s3|pvc|https?|hdfs|webhdfs|hf|oci|file)://[!-~]+",
        "an address that KServe reads models from, like s3://models/churn or pvc://claim/churn",
        limit=1024,
    ),
]
Cpus = Annotated[float, Field(gt=0, le=1024)]
MemoryBytes = Annotated[int, Field(ge=1 << 20, le=1 << 50)]
GpuCount = Annotated[int, Field(ge=0, le=64)]
BatchRows = Annotated[int, Field(ge=0, le=65_536)]


class ExportedFile(Record):
    """A file of an export: its `text`, or the `source` file of the version that has its bytes."""

    path: FilePath
    size_bytes: int
    sha256: str
    text: str | None = None
    source: FilePath | None = None


class ModelExport(Record):
    """A version in the layout of another system; `files` are all that the folder gets, and `notes` what is left to do.

    `manifest` is the signed manifest of the version, with its `signature` by `public_key`. The hash of that key is
    `fingerprint`: who checks it knows which platform made the export.
    """

    version: str
    id: ObjectId
    to: ExportTarget
    files: tuple[ExportedFile, ...]
    label: Label
    notes: tuple[str, ...] = ()
    manifest: str
    signature: str
    public_key: str
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)
