"""Interfaces that serving needs: admission, model versions, feature reads and the prediction sink."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from falaj.errors import Unavailable
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.control.replicas import ServerReplicas
from falaj.records.features import OnlineRows, StoredView, TrainingSet
from falaj.records.governance.identity import FailureReason
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.names import ObjectId
from falaj.records.optimization import VariantChoice
from falaj.records.registry import FileFormat, ModelVersion
from falaj.records.serving.statistics import ServerLoad
from falaj.records.serving.tensors import ServedModel

if TYPE_CHECKING:  # the service is in every process; only the model server loads numpy
    import numpy.typing as npt

    Array = npt.NDArray[Any]

METRICS = "/metrics"
"""Stands for the server's metrics in place of an endpoint; no endpoint has this name."""


LOAD_PATH = "/metrics/load"
"""Where the server tells what it does now, as JSON."""


class LoadVersion(Protocol):
    """Loads a registered version and verifies its signature."""

    def __call__(self, tx: Transaction, found: StoredObject, /) -> ModelVersion: ...


class VersionApprovals(Protocol):
    """The approvals of registered versions."""

    def protected_aliases(self, tx: Transaction, version: ObjectId, /) -> list[tuple[str, bool]]:
        """Return the protected aliases that have pointed at `version`, and whether they demand independence."""
        ...

    def require(
        self, tx: Transaction, version: ModelVersion, alias: str, /, *, independent: bool, where: str
    ) -> None:
        """Raise Denied unless `version` is approved for `alias`, or is what the protected alias points at."""
        ...

    def were_withdrawn(self, tx: Transaction, version: ModelVersion, /) -> bool:
        """Tell whether approvals of `version` were withdrawn, and not given again."""
        ...

    def require_by_policy(self, call: Call, endpoint: StoredObject, version: ModelVersion, /) -> None:
        """Raise Denied if a policy forbids that `version`, with its approvals, answers requests of `endpoint`."""
        ...

    def demanded_alias(self, call: Call, endpoint: StoredObject, /) -> str | None:
        """Return the alias for which policies demand an approval of what `endpoint` serves."""
        ...


class ChooseVariant(Protocol):
    """Chooses what to serve of a version: itself, or a variant that was accepted on this kind of CPU."""

    def __call__(self, tx: Transaction, version: StoredObject, choice: VariantChoice, /) -> StoredObject:
        """Return the version to serve. Raise InvalidInput if there is no such variant."""
        ...


class LoadView(Protocol):
    """Loads the newest version of a feature view; None if there is none."""

    def __call__(self, tx: Transaction, found: StoredObject, /) -> StoredView | None: ...


class TrainingFacts(Protocol):
    """Training sets, and typical values of their columns."""

    def training_set(self, tx: Transaction, found: StoredObject, /) -> TrainingSet: ...

    def typical_values(self, found: StoredObject, columns: Sequence[str], /) -> dict[str, float]:
        """Return a typical value of each column of a training set or view that has any. Takes long: no transaction."""
        ...


class ModelServerClient(Protocol):
    """The model server, seen from another process of the same home."""

    def url(self) -> str | None:
        """Return its URL, if known."""
        ...

    def grpc_address(self) -> str | None:
        """Return where it speaks gRPC, as host and port, if known."""
        ...

    def problem(self) -> str | None:
        """Return what keeps it from serving, if anything does."""
        ...

    def wake(self) -> None:
        """Request that a model server be started."""
        ...

    def replicas(self) -> ServerReplicas:
        """Return its replicas, as of the last seconds."""
        ...

    def restart(self) -> None:
        """Request that its replicas be replaced, one after the other."""
        ...

    def require_engine(self, formats: Collection[FileFormat]) -> None:
        """Raise Unavailable, with the extra to install, if this installation cannot run models of these formats."""
        ...

    def load(self) -> ServerLoad:
        """Return what it does now. Raise Unavailable if it does not run."""
        ...

    def infer(self, path: str, caller: str, body: bytes) -> bytes:
        """Return the response to an inference request of an admitted caller. Raise the error that it carries."""
        ...


class Admission(Protocol):
    """Decides who may call which endpoint. None stands for the server itself, METRICS for its metrics."""

    def recognize(self, credential: str) -> str | None:
        """Return the id of a credential's caller from memory; None if `authenticate` must be called. Does no I/O."""
        ...

    def authenticate(self, credential: str) -> str:
        """Return the id of a credential's caller. Raise Unauthenticated. Runs in a thread."""
        ...

    def admit(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        """Return the caller's name if a valid decision is cached; None if `decide` must be called.

        Called on the event loop for each request, so it takes microseconds and does no I/O. `data` is the body
        of the request, or the bodies of so many `calls`, for the digest of the audit window.
        """
        ...

    def decide(self, credential: str, endpoint: str | None) -> None:
        """Make and cache the decision. Raise Unauthenticated or Denied. Runs in a thread."""
        ...

    def permitted(self, credential: str, endpoints: Sequence[str]) -> Sequence[str]:
        """Return those of `endpoints` that the caller may call. Raise Unauthenticated. Runs in a thread."""
        ...


class AuthenticationFailures(Protocol):
    """Counts failed authentications for the audit log."""

    def add(self, reason: FailureReason, source: str, *, interface: str) -> None: ...


class FeatureReader(Protocol):
    """Reads the newest feature values by entity key."""

    def read(self, view: str, keys: Sequence[str]) -> OnlineRows:
        """Return one row per key. Runs on the event loop, so it takes microseconds. Raise Conflict if not online."""
        ...


class PredictedBatch(NamedTuple):
    """A batch that one version answered: an item for each request, and arrays in the order of the model's tensors.

    `predictions` are the ids in the log, none where its batch is known otherwise; `counts` the rows of each request;
    `requests` the ids that callers gave.
    """

    model: ServedModel
    at: datetime
    endpoint: str
    predictions: Sequence[str]
    counts: Sequence[int]
    callers: Sequence[str]
    requests: Sequence[str]
    inputs: Sequence[Array]
    outputs: Sequence[Array]

    @property
    def rows(self) -> int:
        return sum(self.counts)


class PredictionSink(Protocol):
    """Assigns ids to predictions and receives every answered batch, for the prediction log and drift monitoring."""

    def next_id(self, endpoint: str, version: str) -> str:
        """Return the id of the next prediction of a version; empty if not logged. Called from several threads."""
        ...

    def add(self, batch: PredictedBatch) -> None:
        """Store or queue the batch without blocking. Called on the event loop after the responses are written."""
        ...


@runtime_checkable
class DurableSink(Protocol):
    """A sink that tells when a prediction is on disk."""

    def when_stored(self, prediction: str, done: Callable[[bool], None]) -> None:
        """Call `done` once the prediction is on disk, with true; with false if it will not be, or not soon."""
        ...


class ColumnCollector(Protocol):
    """Sketches inputs and outputs for drift monitoring; called from one background thread."""

    def add(
        self,
        endpoint: str,
        version: str,
        columns: Mapping[str, Array],
        *,
        role: ColumnRole = ColumnRole.FEATURE,
    ) -> None: ...


class NoAuthenticationFailures:
    """For a server without an audit log."""

    def add(self, reason: FailureReason, source: str, *, interface: str) -> None:
        return None


class NoFeatureReader:
    """For a server without feature lookup."""

    def read(self, view: str, keys: Sequence[str]) -> OnlineRows:
        raise Unavailable(f"this server has no feature store to read {view} from")


class NoPredictionSink:
    """For a server without a prediction log."""

    def next_id(self, endpoint: str, version: str) -> str:
        return ""

    def add(self, batch: PredictedBatch) -> None:
        return None
