"""Dependencies of monitoring, provided by assembly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream
from falaj.records.governance.objects import StoredObject

ReadTrainingSet = Callable[[StoredObject], ArrowStream]
"""Streams the rows of a training set that the caller may read."""


@dataclass(frozen=True)
class MonitoringContext:
    """The gate, the reader of training sets, and the encryption of sketches."""

    gate: Gate
    training_set: ReadTrainingSet
    sealed: SealedValues
