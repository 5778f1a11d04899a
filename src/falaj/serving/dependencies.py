"""What serving needs of others: who may call, versions, features by key, and where predictions go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from falaj.errors import Unavailable
from falaj.ports.metadata import Transaction
from falaj.records.features import OnlineRows, StoredView
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.registry import ModelVersion
from falaj.records.serving import ServedModel

if TYPE_CHECKING:  # the room is in every process; numpy is for the model server alone
    import numpy.typing as npt

    Array = npt.NDArray[Any]

METRICS = "/metrics"
"""Stands for the server's metrics where an endpoint is asked for: no endpoint is called so."""


class LoadVersion(Protocol):
    """A registered version, if its signature holds."""

    def __call__(self, tx: Transaction, found: StoredObject, /) -> ModelVersion: ...


class LoadView(Protocol):
    """A feature view in its newest version; none if it has none."""

    def __call__(self, tx: Transaction, found: StoredObject, /) -> StoredView | None: ...


class Admission(Protocol):
    """Who may call which endpoint. None stands for what anyone may ask of the server, METRICS for its metrics."""

    def admit(self, credential: str, endpoint: str | None, data: bytes) -> str | None:
        """The caller's name, if a decision that still holds is in memory; none if it must be made.

        Called on the event loop for each request, so it takes microseconds and does no I/O. `data` is what
        the request brings, for the digest of the audit window.
        """
        ...

    def decide(self, credential: str, endpoint: str | None) -> None:
        """Make the decision, so that `admit` knows it; Unauthenticated or Denied if it is no. Runs in a thread."""
        ...


class FeatureReader(Protocol):
    """Newest feature values by entity key."""

    def read(self, view: str, keys: Sequence[str]) -> OnlineRows:
        """One row per key. Called on the event loop, so it takes microseconds. Conflict if the view is not online."""
        ...


class PredictedRequest(NamedTuple):
    """One request of a batch: what it was called, who sent it, and which rows of the batch are its own.

    `prediction` is its id in the log; empty where none is kept.
    """

    endpoint: str
    prediction: str
    request: str
    caller: str
    rows: slice


class PredictedBatch(NamedTuple):
    """A batch that one version answered at once, with its arrays in the order of the model's tensors."""

    model: ServedModel
    at: datetime
    requests: Sequence[PredictedRequest]
    inputs: Sequence[Array]
    outputs: Sequence[Array]


class PredictionSink(Protocol):
    """Gives each prediction an id, and takes every answered batch, for the prediction log and for drift."""

    def name(self, endpoint: str, version: str) -> str:
        """The id of the next prediction of a version; called from several threads. Empty if none is kept."""
        ...

    def add(self, batch: PredictedBatch) -> None:
        """Called on the event loop after the answers are written; keeps or queues the batch, and never waits."""
        ...


class ColumnCollector(Protocol):
    """Sums up what goes in and comes out, for drift; called from one background thread."""

    def add(
        self,
        endpoint: str,
        version: str,
        columns: Mapping[str, Array],
        *,
        role: ColumnRole = ColumnRole.FEATURE,
    ) -> None: ...


class NoFeatureReader:
    """For a server that looks nothing up."""

    def read(self, view: str, keys: Sequence[str]) -> OnlineRows:
        raise Unavailable(f"this server has no feature store to read {view} from")


class NoPredictionSink:
    """For a server whose predictions nobody keeps."""

    def name(self, endpoint: str, version: str) -> str:
        return ""

    def add(self, batch: PredictedBatch) -> None:
        return None
