"""Model cards, bills of materials, and the differences of two versions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from falaj.records.governance.residency import Label
from falaj.records.models.facts import CodeReference, PackagePin, TrainingHardware
from falaj.records.models.gates import MetricMeasurement
from falaj.records.names import ObjectId
from falaj.records.record import Record
from falaj.records.registry import FileFormat, ModelFile, TensorSpec


class OriginObject(Record):
    """A training set, run or version that a version was made from; its name is empty if the reader may not see it."""

    id: ObjectId
    name: str = ""
    kind: str = ""


class CardFacts(Record):
    """All that is known of a version. `text` is what its author wrote; the rest was recorded."""

    version: str
    id: ObjectId
    format: FileFormat
    files: tuple[ModelFile, ...]
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    example: str | None = None
    metrics: dict[str, float] = {}
    measurements: tuple[MetricMeasurement, ...] = ()
    training_set: OriginObject | None = None
    run: OriginObject | None = None
    params: dict[str, str] = {}
    sources: tuple[OriginObject, ...] = ()
    licence: str | None = None
    hardware: TrainingHardware | None = None
    packages: tuple[PackagePin, ...] = ()
    environment: dict[str, str] = {}
    code: CodeReference | None = None
    label: Label
    zone: str | None = None
    author: str
    created_at: datetime
    key: str
    text: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ModelCard(Record):
    """The card of a version: the facts, those that are missing, and the card as Markdown with its SHA-256."""

    facts: CardFacts
    missing: tuple[str, ...]
    markdown: str
    sha256: str


class ModelBom(Record):
    """The bill of materials of a version: a document of CycloneDX 1.6."""

    version: str
    document: dict[str, Any]


class FactChange(Record):
    """A fact that differs between two versions; None: one of them does not have it."""

    name: str
    before: str | None = None
    after: str | None = None


class MetricChange(Record):
    """A metric of two versions, and the second less the first."""

    name: str
    before: float | None = None
    after: float | None = None
    difference: float | None = None


class VersionDiff(Record):
    """What differs between two versions. Metrics are all shown, the same ones too; `card` is a unified diff."""

    before: str
    after: str
    facts: tuple[FactChange, ...] = ()
    files: tuple[FactChange, ...] = ()
    signature: tuple[FactChange, ...] = ()
    metrics: tuple[MetricChange, ...] = ()
    params: tuple[FactChange, ...] = ()
    packages: tuple[FactChange, ...] = ()
    environment: tuple[FactChange, ...] = ()
    card: tuple[str, ...] = ()
