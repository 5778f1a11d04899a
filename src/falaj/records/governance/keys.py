"""Facts about a workspace's data keys; never the keys."""

from __future__ import annotations

from datetime import datetime

from falaj.records.record import Record


class DataKeyInfo(Record):
    workspace: str
    version: int
    root: str
    created_at: datetime
    destroyed_at: datetime | None = None


class KeyRotation(Record):
    """The root key that wraps from now on, and how many data keys were wrapped again."""

    root: str
    rewrapped: int


class SigningKeyRotation(Record):
    """The fingerprint of the P-256 key that signs model versions from now on, and how many keys verify them."""

    fingerprint: str
    keys: int


class KeyDestruction(Record):
    """Proof that a workspace's keys are gone: its blobs can no longer be read by anyone."""

    workspace: str
    versions: tuple[int, ...]
    blobs: int
    destroyed_at: datetime
