"""What the room works with, handed to it by assembly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream
from falaj.records.governance.objects import StoredObject

ReadTrainingSet = Callable[[StoredObject], ArrowStream]
"""The rows of a training set that the caller was admitted to."""


@dataclass(frozen=True)
class MonitoringContext:
    gate: Gate
    training_set: ReadTrainingSet
    sealed: SealedValues
