"""The interfaces that the job service needs from other services and from the nodes; assembly provides them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from falaj.governance.blobs.direct import UploadGrant
from falaj.governance.operations.call import Call
from falaj.ports.launcher import VolumeMount
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

    def tag(self, call: Call, run: ObjectId, tags: Mapping[str, str]) -> None: ...

    def end(self, call: Call, run: ObjectId, *, status: Outcome) -> None: ...


class Scheduler(Protocol):
    """Decides on a snapshot of the queue, and explains decisions."""

    def decide(self, snapshot: Snapshot) -> tuple[Decision, ...]: ...

    def explain(self, snapshot: Snapshot, job: str) -> Explanation: ...

    def explain_handover(
        self,
        snapshot: Snapshot,
        handed_over: Sequence[Request],
        job: str,
        *,
        said: str | None,
        limit: int,
    ) -> Explanation:
        """Return why a queued job waits where Kueue decides; at most `limit` jobs of a queue wait there at once."""
        ...


class Accounts(Protocol):
    """Queues, budgets of workspaces, and the accounting of attempts; in the caller's transaction."""

    def queues(self, tx: Transaction, *, now: datetime) -> tuple[Queue, ...]: ...

    def budgets(self, tx: Transaction, *, now: datetime) -> tuple[Budget, ...]: ...

    def require_open(self, tx: Transaction, queue: str, workspace: ObjectId) -> None:
        """Raise NotFound if there is no such queue, Denied if the workspace may not submit to it."""
        ...

    @property
    def price(self) -> Price: ...

    def with_cordons(self, tx: Transaction, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return the nodes, with those marked that start no further jobs."""
        ...

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

    def require_network(self) -> None:
        """Raise InvalidInput if the nodes give jobs no network."""
        ...

    def volumes(self, names: Sequence[str], workspace: str) -> tuple[VolumeMount, ...]:
        """Return the volumes of these names; InvalidInput for one that jobs of the workspace may not use."""
        ...

    def require_storage(
        self, volumes: Sequence[VolumeMount], workspace: str, *, disk_bytes: int | None
    ) -> None:
        """Raise InvalidInput if a volume is not there, or if no node gives a job so much disk space."""
        ...

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        """Return output of a running attempt from `offset`; empty where there is no more."""
        ...


class BlobSource(Protocol):
    """The bytes of blobs. `facts` raises NotFound for a deleted blob; `keep` commits a staged one; `erase` removes
    the bytes of a deleted one, and does nothing to others. `grant_upload` returns what a worker needs to upload one to
    the store itself, or none; `discard_upload` removes what it uploaded."""

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob: ...

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]: ...

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None: ...

    def erase(self, blob: ObjectId) -> None: ...

    def grant_upload(self, workspace: ObjectId, *, zone: str) -> UploadGrant | None: ...

    def discard_upload(self, grant: UploadGrant) -> None: ...
