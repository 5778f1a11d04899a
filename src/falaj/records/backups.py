"""Backups: their manifest, the hold that keeps bytes from being deleted meanwhile, and what a restore did."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.names import TextRule
from falaj.records.record import Record

Sha256 = Annotated[str, TextRule("[0-9a-f]{64}", "a SHA-256 in 64 hex digits", limit=64)]
BackupId = Annotated[str, TextRule("backup_[0-9a-z]{1,40}", "the id of a backup", limit=60)]
HomeId = Annotated[str, TextRule("home_[0-9a-z]{1,40}", "the id of a home", limit=60)]
Ed25519Key = Annotated[str, TextRule("[0-9a-f]{64}", "an Ed25519 public key in 64 hex digits", limit=64)]


def backup_message(log_id: str, manifest: str) -> bytes:
    """Return the message that the platform signs; its beginning makes the signature fit nothing but a backup."""
    return f"falaj backup v1\n{log_id}\n{manifest}\n".encode()


class BackupHold(Record):
    """A backup that is being made: until `held_until` no stored bytes are deleted. It is extended while it goes on.

    `public_key` is that of the platform: only earlier backups that it signed are taken as copied before.
    """

    id: str
    log_id: str
    public_key: Ed25519Key
    began_at: datetime
    held_until: datetime


class BackupSignature(Record):
    """The platform's signature of a manifest: Ed25519 over the log id and the manifest's SHA-256."""

    public_key: Ed25519Key
    signature: Annotated[str, TextRule("[0-9a-f]{128}", "an Ed25519 signature in 128 hex digits", limit=128)]


class SignedBackup(Record):
    """A manifest as the text that was signed, and the signature."""

    manifest: str
    signed: BackupSignature


class AuditTip(Record):
    """The size and root of the audit log at one moment."""

    size: Annotated[int, Field(ge=0)]
    root: Sha256


class BackupFile(Record):
    """A file of a backup. `stamp` tells whether the original has changed since: its time of change in nanoseconds."""

    place: str
    name: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256
    stamp: str


class BackupManifest(Record):
    """Everything in one backup. `tip` is the audit log in its database: a restored platform goes on from there."""

    format: Literal[1] = 1
    log_id: str
    home: HomeId
    version: str
    schema_version: str
    metadata: Literal["sqlite", "postgres"]
    taken_at: datetime
    tip: AuditTip
    files: tuple[BackupFile, ...]
    missing: tuple[str, ...] = ()
    """Files that the database refers to and that were not there."""
    damaged: tuple[str, ...] = ()
    """Files that were there, and were not what the database says was written."""
    left_out: tuple[str, ...] = ()
    """Zones whose blobs and tables are not in it: some of their data may not lie where the backup does."""

    @property
    def name(self) -> str:
        """The name of the backup, by its time: sorted by name they are in order."""
        return f"{self.taken_at:%Y%m%dT%H%M%S.%fZ}"


class BackupResult(Record):
    """A finished backup: how much is in it, and how much of that was copied now."""

    directory: str
    name: str
    taken_at: datetime
    entries: int
    files: int
    size_bytes: int
    copied_files: int
    copied_bytes: int
    freed_bytes: int
    keys: str | None
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class RestoreResult(Record):
    """A restored home, or, where it was only checked, what would be restored.

    `public_key` is that which signed it; `signer_known` says whether that is known to be the platform's.
    """

    directory: str
    name: str
    public_key: str
    signer_known: bool
    home: str | None
    taken_at: datetime
    entries: int
    lost_entries: int
    """Entries of the audit log after the backup that are known from signed heads, and gone."""
    files: int
    size_bytes: int
    views: int
    """Views whose online values were written again."""
    not_online: tuple[str, ...] = ()
    """Views whose online values could not be written again, and why."""
    left_out: tuple[str, ...] = ()
    """Files that are damaged in the backup, and were left out."""
    without_zones: tuple[str, ...] = ()
    """Zones whose blobs and tables are not in the backup."""
