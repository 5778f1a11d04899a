"""Models: versions that never change, and the aliases that point at them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.governance.identity import Appointment
from falaj.records.governance.residency import Label
from falaj.records.models.facts import CodeReference, PackagePin, TrainingHardware
from falaj.records.models.gates import PromotionEvidence
from falaj.records.names import Name, ObjectId, PrincipalId, Reference, RefersTo, TextRule
from falaj.records.record import Record
from falaj.records.tracking import Tag

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
Description = Annotated[str, Field(max_length=10_000)]
"""What a model or a version is about, in words that may change; the card is signed with its version."""

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
    SKOPS = "skops"
    PYTHON = "python"
    ENSEMBLE = "ensemble"
    """A graph of other versions and of lookups, which `models.compose` makes."""
    MLFLOW = "mlflow"
    """A version that MLflow's client loads, and of which no file is a model that Falaj serves."""
    PICKLE = "pickle"
    """Loading it runs code. It is kept where a policy allows that, and never loaded here."""
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


MANIFEST_FILE, SIGNATURE_FILE = "manifest.json", "model.sig"
"""Files of an exported version beside those that were registered."""


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

    The signature is in the format of OpenSSF model signing. It covers the version's files and, as `manifest.json`, this
    record as canonical JSON.
    `example` is the path of a file with an example of its input; `residency` is the label that it was registered with.
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
    packages: tuple[PackagePin, ...] = ()
    hardware: TrainingHardware | None = None
    licence: str | None = None
    example: str | None = None
    code: CodeReference | None = None
    zone: str | None = None
    residency: Label | None = None
    card: str = ""
    author: PrincipalId
    created_at: datetime

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class SignatureFormat(StrEnum):
    """How a version is signed."""

    OPENSSF = "openssf-model-signing"
    """A sigstore bundle over the files and the manifest, by a P-256 key: the `model.sig` of its export."""


class ModelVersion(ModelManifest):
    """A version of a model. What is not signed may change: its label, which follows its sources, its description, its
    tags, and the aliases that point at it.

    `key` is the fingerprint of the key that made `signature`.
    """

    key: str
    signature: str
    signed_as: SignatureFormat = SignatureFormat.OPENSSF
    label: Label
    description: str = ""
    tags: tuple[Tag, ...] = ()
    aliases: tuple[str, ...] = ()
    updated_at: datetime | None = None


class VersionKey(Record):
    """The public key, as PEM, that verifies `model.sig` of an exported version; `fingerprint` is the PEM's SHA-256.

    `signed_as` is how the version itself was signed at registration.
    """

    version: str
    signed_as: SignatureFormat = SignatureFormat.OPENSSF
    fingerprint: str
    pem: str


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
    description: str = ""
    tags: tuple[Tag, ...] = ()
    created_at: datetime
    updated_at: datetime | None = None


class RemovedTags(Record):
    """Tags that a model or a version no longer has."""

    name: str
    keys: tuple[str, ...]


class AliasMove(StrEnum):
    """Why an alias moved."""

    PROMOTE = "promote"
    ROLLBACK = "rollback"
    PROTECT = "protect"
    """It stayed where it was, and was protected: no rollback leads to a version from before."""
    REMOVE = "remove"
    """It points at no version from then on; the move names the version that it left."""


class AliasChange(Record):
    """One move of an alias, numbered from 1."""

    seq: int
    alias: str
    version: str
    previous: str | None
    move: AliasMove
    by: str
    at: datetime
    evidence: PromotionEvidence | None = None


class AliasState(Record):
    """Where an alias points, or pointed at a time: the move that made it so. Without one, or once removed, nowhere."""

    model: str
    alias: str
    at: datetime
    version: str | None = None
    change: AliasChange | None = None


class Approval(Record):
    """`by` found `version` fit for `alias`, and for nothing else. A rollback from the version withdraws it.

    `appointment` is how `by` came to be an approver (None: by a policy, or it was not recorded then); `independent`:
    without the version's authors. `evidence` is what was known of the version then.
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
    evidence: PromotionEvidence | None = None


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
    """The progress of verifying a version's bytes and, once `finished`, the verdict.

    `signed_as` and `key` say which signature holds; none where it does not.
    """

    version: str
    signed_as: SignatureFormat | None = None
    key: str | None = None
    finished: bool
    ok: bool = False
    checked_bytes: int = 0
    size_bytes: int = 0
    problems: tuple[str, ...] = ()


class ExportTarget(StrEnum):
    """What a version is exported for."""

    FILES = "files"
    """The files as they were registered, the manifest, and the signature."""
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

    `model.sig` among them signs all others, in the format of OpenSSF model signing, by `public_key` (PEM). The SHA-256
    of that text is `fingerprint`: who checks it knows which platform made the export.
    """

    version: str
    id: ObjectId
    to: ExportTarget
    files: tuple[ExportedFile, ...]
    label: Label
    notes: tuple[str, ...] = ()
    public_key: str
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)
