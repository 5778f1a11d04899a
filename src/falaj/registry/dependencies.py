"""Dependencies of the registry, provided by assembly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from falaj.ports.metadata import Transaction
from falaj.records.control.predictions import PredictionRun
from falaj.records.governance.objects import StoredObject
from falaj.records.models.gates import CheckFinding
from falaj.records.names import ObjectId
from falaj.records.registry import ModelVersion

RunParams = Callable[[Transaction, ObjectId], Mapping[str, str]]
"""Returns the parameters of a run by key."""


class LoggedFiles(Protocol):
    """What was logged to a run or a logged model: its files, the run that made it, and what was measured."""

    def files(self, tx: Transaction, owner: StoredObject, folder: str) -> Mapping[str, ObjectId]:
        """Return the blobs of the files in a folder, by their paths in it. Conflict if `owner` is deleted."""
        ...

    def run_of(self, tx: Transaction, owner: StoredObject) -> ObjectId | None: ...

    def metrics(self, tx: Transaction, owner: StoredObject) -> Mapping[str, float]:
        """Return the newest values that are numbers, by metric."""
        ...


class NothingLogged:
    """For a registry without tracking."""

    def files(self, tx: Transaction, owner: StoredObject, folder: str) -> Mapping[str, ObjectId]:
        return {}

    def run_of(self, tx: Transaction, owner: StoredObject) -> ObjectId | None:
        return None

    def metrics(self, tx: Transaction, owner: StoredObject) -> Mapping[str, float]:
        return {}


GateCheck = Callable[[Transaction, ModelVersion], CheckFinding]
"""Decides whether a version may come into use. A service adds one by a function that assembly registers by name."""


class EvaluationSource(Protocol):
    """What evaluating a version takes of other services.

    `columns` returns the columns of a training set, and those that are keys, times or come from views. `plan` returns
    how a version predicts the rows of a set that has the column `target`; InvalidInput if it cannot be evaluated.
    """

    def columns(self, tx: Transaction, data: StoredObject) -> tuple[tuple[str, ...], frozenset[str]]: ...

    def plan(self, tx: Transaction, version: ModelVersion, target: str) -> PredictionRun: ...


def no_params(tx: Transaction, run: ObjectId) -> Mapping[str, str]:
    """Return no parameters: for a registry without tracking."""
    return {}
