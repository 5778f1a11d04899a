"""The one row that everything stored has."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId, PrincipalId, TextRule
from falaj.records.record import Record


class StoredObject(Record):
    """A stored object: its place, owner and label. `label` includes inherited restrictions; `own_label` does not."""

    id: ObjectId
    workspace: ObjectId
    kind: str
    name: str
    owner: PrincipalId
    zone: str | None = None
    label: Label = UNRESTRICTED
    own_label: Label = UNRESTRICTED
    created_at: datetime

    @property
    def home(self) -> ObjectId:
        """The workspace that it is in; a workspace is in itself."""
        return self.id if self.kind == "workspace" else self.workspace

    @property
    def address(self) -> str:
        return f"{self.kind}:{self.name}"


T = TypeVar("T", bound=Record)

PageSize = Annotated[int, Field(ge=1, le=1000)]
Cursor = Annotated[str, TextRule("[A-Za-z0-9_.-]*", "a cursor is what `next` of a page says", limit=200)]


class Page(Record, Generic[T]):
    """A part of a list; `next` asks for the part after it, none if this is the last."""

    items: tuple[T, ...]
    next: str | None = None


class LabelChange(Record):
    """An object after its label changed, and what the change made illegal where it lies."""

    object: StoredObject
    reached: int
    misplaced: tuple[StoredObject, ...] = ()
