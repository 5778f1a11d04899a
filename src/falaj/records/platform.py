"""The platform at a glance."""

from __future__ import annotations

from falaj.records.governance.residency import Zone
from falaj.records.record import Record


class PlatformFacts(Record):
    """What runs; `controller` is the holder of the lease, none if nobody acts."""

    version: str
    controller: str | None
    zones: tuple[Zone, ...]
    users: int


class CleanupResult(Record):
    """How many idempotency keys, events and sign-in links were dropped."""

    keys: int
    events: int
    links: int


class MetricsText(Record):
    text: str


class PlatformStatus(Record):
    """What `falaj status` says of a home."""

    home: str
    running: bool
    ready: bool = False
    url: str | None = None
    pid: int | None = None
    version: str | None = None
    controller: str | None = None
    models: str | None = None
    """Where the model server answers; none until something is deployed."""
