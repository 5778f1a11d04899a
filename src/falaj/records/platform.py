"""The platform at a glance."""

from __future__ import annotations

from falaj.records.governance.residency import Zone
from falaj.records.record import Record


class PlatformFacts(Record):
    """The running platform; `controller` is the holder of the lease, or none.

    `failing` has the processes that keep failing, each with a sentence: since when, why, and where its log is.
    """

    version: str
    controller: str | None
    zones: tuple[Zone, ...]
    users: int
    failing: dict[str, str] = {}


class CleanupResult(Record):
    """The number of idempotency keys, events and sign-in links that were deleted."""

    keys: int
    events: int
    links: int


class MetricsText(Record):
    text: str


class PlatformStatus(Record):
    """The status of a home, as `falaj status` shows it."""

    home: str
    running: bool
    ready: bool = False
    url: str | None = None
    console: str | None = None
    """The URL of the console; none where it does not run."""
    pid: int | None = None
    version: str | None = None
    controller: str | None = None
    models: str | None = None
    """The URL of the model server; none until something is deployed."""
    models_grpc: str | None = None
    """Where the model server speaks gRPC, as host and port."""
    models_problem: str | None = None
    """What keeps the model server from serving."""
    replicas: str | None = None
    """How many replicas of the model server are ready, and why as many are wanted."""
    failing: tuple[str, ...] = ()
    """A sentence for each process that keeps failing: since when, why, and where its log is."""
