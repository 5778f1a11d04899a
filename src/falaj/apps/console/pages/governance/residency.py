"""Residency: zones, where data lies, what restricts it, and attempts that were refused."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import GOOD, empty_state, error_card, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, draw_tabs, panel
from falaj.apps.console.times import Times
from falaj.errors import Denied, FalajError, NotFound, ResidencyDenied
from falaj.records.governance.audit import AuditEntry
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import UNRESTRICTED, Zone
from falaj.records.scheduling.hardware import Machine
from falaj.sdk.platform import Platform

STORED = ("blob", "dataset", "model_version", "view", "run", "logged_model", "job", "endpoint", "predictions")
"""The kinds of objects whose bytes lie somewhere, or that restrict where they lie."""
LISTED = 1000
"""So many objects of a kind are counted."""
REFUSED, SCANNED_PAGES = 50, 4
ZONE_COLUMNS = (
    TableColumn("name", "Zone"),
    TableColumn("jurisdiction", "Jurisdiction"),
    TableColumn("default", "Default"),
    TableColumn("objects", "Objects of this workspace", "number"),
    TableColumn("nodes", "Nodes"),
)
RESTRICTED_COLUMNS = (
    TableColumn("name", "Object"),
    TableColumn("kind", "Kind"),
    TableColumn("zone", "Lies in"),
    TableColumn("label", "Restriction"),
    TableColumn("own", "Where it comes from"),
)
REFUSED_COLUMNS = (
    TableColumn("at", "At", "time"),
    TableColumn("caller", "Caller"),
    TableColumn("action", "Action", "mono"),
    TableColumn("objects", "Objects", "mono"),
    TableColumn("rule", "Rule"),
)


@dataclass(frozen=True)
class ResidencyRecords:
    """What the page is made from; `refused` is none where the person may not read the audit log."""

    zones: Sequence[Zone]
    objects: Sequence[StoredObject] = ()
    machines: Sequence[Machine] = ()
    refused: Sequence[AuditEntry] | None = None


@dataclass(frozen=True)
class ResidencyView:
    zones: tuple[TableRow, ...]
    names: tuple[str, ...]
    """The zones with their jurisdictions, in the order of the parts of each bar."""
    bars: tuple[Bar, ...]
    """How many objects of each kind lie in each zone."""
    restricted: tuple[TableRow, ...]
    refused: tuple[TableRow, ...] | None
    is_cut: bool


def residency_view(records: ResidencyRecords, *, times: Times) -> ResidencyView:
    """Return what the page shows."""
    placed = Counter((each.kind, each.zone) for each in records.objects if each.zone is not None)
    kinds = tuple(dict.fromkeys(kind for kind, _ in sorted(placed)))
    per_kind = Counter(each.kind for each in records.objects)
    return ResidencyView(
        zones=tuple(_zone(zone, records) for zone in records.zones),
        names=tuple(f"{zone.name} ({zone.jurisdiction})" for zone in records.zones),
        bars=tuple(
            Bar(kind.replace("_", " "), tuple(placed[kind, zone.name] for zone in records.zones))
            for kind in kinds
        ),
        restricted=tuple(_restricted(each) for each in records.objects if each.label != UNRESTRICTED),
        refused=None
        if records.refused is None
        else tuple(_refused(entry, times) for entry in records.refused),
        is_cut=any(count >= LISTED for count in per_kind.values()),
    )


def _zone(zone: Zone, records: ResidencyRecords) -> TableRow:
    nodes = [machine.node.name for machine in records.machines if machine.node.zone == zone.name]
    cells = {
        "name": zone.name,
        "jurisdiction": zone.jurisdiction,
        "default": "yes" if zone.default else "",
        "objects": f"{sum(each.zone == zone.name for each in records.objects):,}",
        "nodes": ", ".join(nodes) or "–",
    }
    return TableRow(zone.name, cells)


def _restricted(found: StoredObject) -> TableRow:
    cells = {
        "name": found.name,
        "kind": found.kind,
        "zone": found.zone or "–",
        "label": found.label.describe(),
        "own": "its own label" if found.own_label == found.label else "its sources, by lineage",
    }
    return TableRow(found.id, cells)


def _refused(entry: AuditEntry, times: Times) -> TableRow:
    cells = {
        "at": times.moment(entry.at),
        "caller": entry.caller,
        "action": entry.action,
        "objects": ", ".join(entry.objects),
        "rule": entry.rule,
    }
    return TableRow(str(entry.seq), cells)


# ------------------------------------------------------------------------------------------- drawing


def read_residency(p: Platform, here: str) -> ResidencyRecords:
    """Ask for zones, the objects of the workspace, the nodes, and what was refused."""
    objects: list[StoredObject] = []
    machines: Sequence[Machine] = ()
    refused: list[AuditEntry] | None = None
    for kind in STORED:
        with contextlib.suppress(Denied, NotFound):
            objects += p.objects.list(kind, workspace=here, limit=LISTED).items
    with contextlib.suppress(Denied, NotFound):
        machines = p.nodes.list()
    with contextlib.suppress(Denied, NotFound):
        refused = _denials(p, here)
    return ResidencyRecords(p.zones.list(), objects, machines, refused)


def _denials(p: Platform, here: str) -> list[AuditEntry]:
    """Return the newest entries that were refused because of residency."""
    found: list[AuditEntry] = []
    before: int | None = None
    for _ in range(SCANNED_PAGES):
        page = p.audit.list(workspace=here, outcome="denied", before=before, limit=500)
        found += [entry for entry in page.items if entry.error == ResidencyDenied.code]
        if page.next is None or len(found) >= REFUSED:
            break
        before = int(page.next)
    return found[:REFUSED]


def draw_residency(context: PageContext, view: ResidencyView) -> None:
    with panel("Zones"):
        data_table(ZONE_COLUMNS, view.zones, title="Zones")
    with panel("Where data of this workspace lies"):
        if view.bars:
            title = "How many objects of each kind lie in each zone"
            options = bar_chart(view.bars, view.names, palette(context.is_dark), title=title, unit="objects")
            chart(options, height_px=110 + 34 * len(view.bars))
            if view.is_cut:
                ui.label(f"Of each kind {LISTED:,} objects are counted.").classes("muted small")
        else:
            empty_state(
                "Nothing is stored in this workspace yet.", command="falaj blobs put FILE NAME", icon="public"
            )
    with panel(f"Restricted objects ({len(view.restricted)})"):
        if view.restricted:
            data_table(RESTRICTED_COLUMNS, view.restricted, title="Restricted objects")
        else:
            empty_state(
                "No object of this workspace is restricted.",
                command="falaj objects label blob:NAME --only AE --class personal",
                icon="public",
            )
    with panel("Refused attempts").props("data-part=refused"):
        if view.refused is None:
            ui.label("Auditors of the workspace see what was refused.").classes("muted")
        elif view.refused:
            data_table(REFUSED_COLUMNS, view.refused, title="Refused attempts")
        else:
            ui.label("Nothing was refused because of residency.").classes("muted")


def draw_check(context: PageContext, zones: Sequence[str]) -> None:
    """Draw the form that asks whether an object may be stored in a zone."""

    async def check() -> None:
        asked, zone = str(name.value or "").strip(), str(place.value)
        if not asked:
            return
        result.clear()
        try:
            await context.ask(lambda p: p.zones.check(asked, zone))
        except FalajError as error:
            with result:
                error_card(error)
            return
        with result:
            state_badge(f"{asked} may be stored in {zone}", tone=GOOD)

    with panel("May it lie there?"):
        with ui.element("div").classes("toolbar"):
            name = (
                ui.input("Object", placeholder="blob:figures").props("dense outlined").classes("grow filter")
            )
            name.on("keydown.enter", check)
            place = (
                ui.select([*zones], value=zones[0], label="Zone").props("dense outlined").classes("chooser")
            )
            ui.button("Check", on_click=check).props("unelevated dense")
        result = ui.element("div")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    draw_tabs(context, "residency")

    async def load() -> ResidencyView:
        records = await context.ask(lambda p: read_residency(p, context.workspace))
        return residency_view(records, times=context.times)

    zones = await context.ask(lambda p: [zone.name for zone in p.zones.list()])
    await context.region(
        load,
        lambda view: draw_residency(context, view),
        events=("blobs.*", "objects.*", "features.*", "models.*"),
    )
    draw_check(context, zones)


PAGE = ConsolePage(
    "/w/{workspace}/governance/residency",
    "Residency",
    draw,
    entry=ENTRY,
    reads=("zones.list", "zones.check", "objects.list", "nodes.list", "audit.list"),
)
