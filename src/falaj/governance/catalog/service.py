"""The operations on any stored object: list, show and label it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from falaj.governance import objects
from falaj.governance.lineage import graph
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.governance.policy.epochs import advance_epoch
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, LabelChange, Page, PageSize, StoredObject
from falaj.records.governance.residency import UNRESTRICTED, Label, union
from falaj.records.names import AnyRef, DataClass, Jurisdiction, TextRule, WorkspaceRef

Kind = Annotated[str, TextRule("[a-z_]+", "a kind is a-z and '_', like blob", limit=64)]


SearchText = Annotated[str, Field(min_length=1, max_length=200)]
SEARCHED = 200
"""Objects that are read at a time."""


class Objects:
    """Find objects and label them."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("objects.show", resource="object", mode=Mode.READ, allow={Role.VIEWER, "owner"})
    def show(self, object: AnyRef) -> StoredObject:
        """Show an object: its zone, owner and label."""
        return current_call().target

    @operation("objects.list", resource="workspace", mode=Mode.READ)
    def list(
        self, kind: Kind, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[StoredObject]:
        """The objects of one kind in a workspace."""
        home = current_call().target.id
        return list_page(self.gate, [kind], lambda page: page, after=after, limit=limit, workspace=home)

    @operation("objects.search", resource="workspace", mode=Mode.READ)
    def search(
        self,
        text: SearchText,
        *,
        workspace: WorkspaceRef | None = None,
        limit: Annotated[int, Field(ge=1, le=100)] = 20,
    ) -> tuple[StoredObject, ...]:
        """Find objects of a workspace by a part of their name, or by the beginning of their id; the newest first."""
        call, found, before = current_call(), list[StoredObject](), None
        visibility = self.gate.visibility()
        while len(found) < limit:
            some = objects.matching(call.tx, text, workspace=call.target.id, before=before, limit=SEARCHED)
            found += filter(visibility.allows, some)
            if len(some) < SEARCHED:
                break
            before = some[-1].id[-26:]
        return tuple(found[:limit])

    @operation("objects.label", resource="object")
    def label(
        self,
        object: AnyRef,
        *,
        only: Annotated[tuple[Jurisdiction, ...], Field(min_length=1)] | None = None,
        classes: tuple[DataClass, ...] = (),
    ) -> LabelChange:
        """Restrict an object, and all that comes from it, to jurisdictions; name the classes of its data.

        A label only adds restrictions; to lift them takes objects.unlabel.
        """
        added = Label(only=None if only is None else frozenset(only), classes=frozenset(classes))
        return self._set_label(current_call().target.own_label | added)

    @operation("objects.unlabel", resource="object", allow=Role.ADMIN)
    def unlabel(self, object: AnyRef) -> LabelChange:
        """Lift an object's own label; what flows in from its sources stays."""
        return self._set_label(UNRESTRICTED)

    def _set_label(self, own: Label) -> LabelChange:
        call = current_call()
        inherited = graph.inherited_label(call.tx, call.target)
        changed = call.target.model_copy(update={"own_label": own, "label": union([own, inherited])})
        objects.relabel(call.tx, changed.id, label=changed.label, own=own)
        advance_epoch(call.tx)
        reached = graph.reflow(call.tx, changed)
        misplaced = [each for each in [changed, *reached] if self._is_misplaced(each)]
        shown = self.gate.visible(misplaced[:100])
        return LabelChange(object=changed, reached=len(reached), misplaced=tuple(shown))

    def _is_misplaced(self, found: StoredObject) -> bool:
        return found.zone is not None and not found.label.permits(
            self.gate.zones.named(found.zone).jurisdiction
        )
