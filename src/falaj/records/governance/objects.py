"""The one row that everything stored has."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId, PrincipalId, TextRule
from falaj.records.record import Record, records_table


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

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """Return the items as an HTML table, for notebooks."""
        return records_table(self._title(), self.items)

    def _title(self) -> str:
        kind = type(self.items[0]).__name__ if self.items else "nothing"
        more = f", more with cursor={self.next!r}" if self.next else ""
        return f"Page of {len(self.items)} × {kind}{more}" if self.items else "Page of nothing"


class LabelChange(Record):
    """An object after its label changed, and what the change made illegal where it lies."""

    object: StoredObject
    reached: int
    misplaced: tuple[StoredObject, ...] = ()
