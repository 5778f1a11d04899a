"""The interfaces that the job service needs from other services and from the nodes; assembly provides them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import (
    Budget,
    Decision,
    Explanation,
    Node,
    Placement,
    Price,
    Queue,
    Request,
    Snapshot,
)
from falaj.records.tracking import Outcome


class TrackedRuns(Protocol):
    """The runs that jobs log to: started, filled and ended in the transaction of the job's own operation."""

    def start(
        self,
        call: Call,
        workspace: StoredObject,
        *,
        experiment: str,
        name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> ObjectId: ...

    def params(self, tx: Transaction, run: ObjectId) -> Mapping[str, str]: ...

    def attach(self, call: Call, run: ObjectId, artifacts: Sequence[tuple[str, Blob]]) -> None: ...

    def end(self, call: Call, run: ObjectId, *, status: Outcome) -> None: ...


class Scheduler(Protocol):
    """Decides on a snapshot of the queue, and explains decisions."""

    def decide(self, snapshot: Snapshot) -> tuple[Decision, ...]: ...

    def explain(self, snapshot: Snapshot, job: str) -> Explanation: ...


class Accounts(Protocol):
    """Queues, budgets of workspaces, and the accounting of attempts; in the caller's transaction."""

    def queues(self, tx: Transaction, *, now: datetime) -> tuple[Queue, ...]: ...

    def budgets(self, tx: Transaction, *, now: datetime) -> tuple[Budget, ...]: ...

    def require_open(self, tx: Transaction, queue: str, workspace: ObjectId) -> None:
        """Raise NotFound if there is no such queue, Denied if the workspace may not submit to it."""
        ...

    @property
    def price(self) -> Price: ...

    def begin(
        self,
        tx: Transaction,
        request: Request,
        *,
        attempt: int,
        user: ObjectId,
        placements: Sequence[Placement],
        gpu_models: tuple[str, ...],
        borrows: bool,
        now: datetime,
    ) -> None: ...

    def end(
        self,
        tx: Transaction,
        job: ObjectId,
        *,
        attempt: int,
        verdict: str,
        used: ResourceUsage,
        now: datetime,
    ) -> None: ...


class ExecutionBackend(Protocol):
    """The nodes that jobs run on."""

    def nodes(self) -> tuple[Node, ...]: ...

    def require_isolation(self, *, users: int) -> None:
        """Raise IsolationRefused if user code cannot be isolated from the platform and there are several `users`."""
        ...

    def require_environment(self, name: str) -> None:
        """Raise InvalidInput if the nodes have no environment of that name."""
        ...

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        """Return output of a running attempt from `offset`; empty where there is no more."""
        ...


class BlobSource(Protocol):
    """The bytes of blobs. `facts` raises NotFound for a deleted blob; `keep` commits a staged one; `erase` removes
    the bytes of a deleted one, and does nothing to others."""

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob: ...

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]: ...

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None: ...

    def erase(self, blob: ObjectId) -> None: ...
