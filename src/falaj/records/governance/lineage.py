"""The graph of what came from what."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId
from falaj.records.record import Record


class Direction(StrEnum):
    UP = "up"
    DOWN = "down"
    BOTH = "both"


class LineageNode(Record):
    """An object or an operation in the graph; `depth` is negative upstream, positive downstream of the start.

    `next_to` are the nodes through which it leads to the start, the nearest first.
    """

    id: ObjectId
    kind: str
    name: str
    depth: int
    next_to: tuple[ObjectId, ...] = ()
    workspace: ObjectId | None = None
    zone: str | None = None
    label: Label = UNRESTRICTED
    at: datetime | None = None
