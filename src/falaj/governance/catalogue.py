"""What is stored: any object, its label, and the zones that it may lie in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from falaj.governance import lineage_store, objects
from falaj.governance.call import current_call
from falaj.governance.epochs import advance_epoch
from falaj.governance.gate import Gate
from falaj.governance.listing import page
from falaj.governance.operations import Mode, operation
from falaj.records.identity import Role
from falaj.records.names import AnyRef, DataClass, Jurisdiction, Spelled, WorkspaceRef, ZoneName
from falaj.records.objects import Cursor, Labelled, Page, PageSize, StoredObject
from falaj.records.residency import UNRESTRICTED, Label, Zone, union

Kind = Annotated[str, Spelled("[a-z_]+", "a kind is a-z and '_', like blob", limit=64)]


class Objects:
    """Find objects and label them."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("object.show", resource="object", mode=Mode.READ, allow={Role.VIEWER, "owner"})
    def show(self, object: AnyRef) -> StoredObject:
        """Where an object lies, whose it is, and under which restriction."""
        return current_call().target

    @operation("object.list", resource="workspace", mode=Mode.READ)
    def list(
        self, kind: Kind, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[StoredObject]:
        """The objects of one kind in a workspace."""
        home = current_call().target.id
        return page(self.gate, [kind], lambda found: found, after=after, limit=limit, workspace=home)

    @operation("object.label", resource="object")
    def label(
        self,
        object: AnyRef,
        *,
        only: Annotated[tuple[Jurisdiction, ...], Field(min_length=1)] | None = None,
        classes: tuple[DataClass, ...] = (),
    ) -> Labelled:
        """Restrict an object, and all that comes from it, to jurisdictions; name the classes of its data.

        A label only adds restrictions; to lift them takes object.unlabel.
        """
        added = Label(only=None if only is None else frozenset(only), classes=frozenset(classes))
        return self._set_label(current_call().target.own_label | added)

    @operation("object.unlabel", resource="object", allow=Role.ADMIN)
    def unlabel(self, object: AnyRef) -> Labelled:
        """Lift an object's own label; what flows in from its sources stays."""
        return self._set_label(UNRESTRICTED)

    def _set_label(self, own: Label) -> Labelled:
        call = current_call()
        inherited = lineage_store.inherited_label(call.tx, call.target)
        changed = call.target.model_copy(update={"own_label": own, "label": union([own, inherited])})
        objects.relabel(call.tx, changed.id, label=changed.label, own=own)
        advance_epoch(call.tx)
        reached = lineage_store.reflow(call.tx, changed)
        misplaced = [each for each in [changed, *reached] if self._is_misplaced(each)]
        shown = self.gate.visible(misplaced[:100])
        return Labelled(object=changed, reached=len(reached), misplaced=tuple(shown))

    def _is_misplaced(self, found: StoredObject) -> bool:
        return found.zone is not None and not found.label.permits(
            self.gate.zones.named(found.zone).jurisdiction
        )


class ZoneList:
    """The zones, and whether something may lie in one."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("zone.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self) -> tuple[Zone, ...]:
        """The zones of this platform; they are configured in falaj.toml."""
        return tuple(self.gate.zones.all())

    @operation("zone.check", resource="object", mode=Mode.READ)
    def check(self, object: AnyRef, zone: ZoneName) -> Zone:
        """Ask whether an object may lie in a zone; a refusal shows the path that forbids it."""
        return self.gate.zones.named(zone)
