"""Entries, heads and proofs of the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from falaj.records.record import Record

Outcome = Literal["done", "denied", "failed"]


class RestoredFrom(Record):
    """What a restore says in the log: which backup, how many entries it had, and up to which entry heads were known.

    Entries from `size` up to `known` were made after the backup, and are gone.
    """

    backup: str
    taken_at: datetime
    size: int
    root: str
    known: int


class AuditEntry(Record):
    """An audit entry: caller, action, objects, origin, time, rule and outcome.

    `input` is an HMAC of the input. On hot paths one entry stands for a window of calls: `count` of them, `until` then.
    `rows` are the rows that it changed (table, key, digest before and after; more of them in further entries, by
    `part`), `published` the table versions. `witness` and `accepted` are statements about the log itself.
    """

    seq: int
    at: datetime
    caller: str
    action: str
    outcome: Outcome
    objects: tuple[str, ...]
    workspace: str | None
    origin: str
    rule: str
    input: str
    request: str | None = None
    token: str | None = None
    error: str | None = None
    created: tuple[str, ...] = ()
    count: int = 1
    until: datetime | None = None
    part: int = 1
    rows: tuple[tuple[str, tuple[str | int, ...], str | None, str | None], ...] = ()
    published: tuple[dict[str, Any], ...] = ()
    witness: dict[str, str] | None = None
    accepted: dict[str, Any] | None = None
    restored: RestoredFrom | None = None


class SignedHead(Record):
    """The size and root of the log at a moment, signed by the key service."""

    log_id: str
    size: int
    root: str
    at: str
    key: str
    signature: str


class ExportLine(Record):
    """One line of an export that the offline verifier reads: the header, an entry, or a signed head."""

    falaj_audit: int | None = None
    log_id: str | None = None
    first: int | None = None
    size: int | None = None
    frontier: tuple[str, ...] | None = None
    entry: dict[str, Any] | None = None
    leaf: str | None = None
    head: SignedHead | None = None


class InclusionProof(Record):
    """That `entry` stands at `index` in the log whose signed head is `head`."""

    entry: dict[str, Any]
    index: int
    size: int
    path: tuple[str, ...]
    head: SignedHead


class ConsistencyProof(Record):
    """That the log of `since` entries with this `root` is the beginning of the log whose signed head is `head`."""

    since: int
    root: str
    path: tuple[str, ...]
    head: SignedHead


class PublicKey(Record):
    """The public key that an auditor needs to verify the log."""

    log_id: str
    key: str
    ed25519: str


class LogCheck(Record):
    """The progress of verifying the log in the database and, once `finished`, the verdict."""

    finished: bool
    ok: bool = False
    entries: int
    of: int
    heads: int = 0
    unsigned_tail: int = 0
    checked_bytes: int = 0
    size_bytes: int = 0
    """Of a deep check: how many bytes of blobs were hashed, and how many there are."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not damage, but has to be said: that the platform was restored, and what was lost."""


class AuditAcceptance(Record):
    """The damage that was accepted: entries that are not the platform's, and what else was wrong. Signed at `size`."""

    size: int
    entries: tuple[int, ...]
    problems: tuple[str, ...]
