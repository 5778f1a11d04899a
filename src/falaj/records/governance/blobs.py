"""Stored bytes, as services see them."""

from __future__ import annotations

from datetime import datetime

from falaj.records.governance.residency import Label
from falaj.records.names import ObjectId
from falaj.records.record import Record


class Blob(Record):
    """Immutable bytes under a name. Until it is committed it is staged: unnamed, and removed when it expires."""

    id: ObjectId
    workspace: ObjectId
    name: str
    zone: str
    size_bytes: int
    sha256: str
    label: Label
    created_at: datetime
    committed: bool
