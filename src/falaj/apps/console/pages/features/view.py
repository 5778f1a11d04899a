"""One feature view: definition, versions, freshness, refused files, distributions, lineage, users and readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.lineage import (
    LineageItem,
    LineagePicture,
    draw_lineage,
    draw_tree,
    lineage_picture,
)
from falaj.apps.console.components.sections import (
    Crumb,
    chosen_tab,
    facts,
    heading,
    panel,
    small_table,
    tabs,
)
from falaj.apps.console.components.states import BAD, GOOD, IDLE, WAITING, empty_state, state_badge
from falaj.apps.console.components.texts import plain_text
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.features.catalogue import online_state
from falaj.apps.console.pages.features.distributions import (
    DistributionsView,
    distributions,
    draw_distributions,
    read_sample,
)
from falaj.apps.console.pages.features.quarantine import draw_quarantine, load_quarantine
from falaj.apps.console.times import Times, duration, number
from falaj.errors import Denied, NotFound, shorten
from falaj.records.features import Aggregation, Feature, FeatureView, InvalidRows, StoredView
from falaj.records.governance.audit import AuditEntry, Outcome
from falaj.records.governance.lineage import LineageNode
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import AllowedPrincipal
from falaj.records.record import utc_now
from falaj.sdk.platform import Platform

T = TypeVar("T")
TABS = (
    ("definition", "Definition"),
    ("distributions", "Distributions"),
    ("quarantine", "Quarantine"),
    ("lineage", "Lineage and users"),
    ("access", "Access"),
)
SHOWN_VERSIONS = 20
RULE_CHARACTERS = 80
DEPTH = 6
READS = ("features.read", "features.scan", "features.training_set")
"""Operations by which rows of a view are read."""
SEARCHED = 200
"""Newest entries of the audit log of one kind that are looked through."""


@dataclass(frozen=True)
class ViewRecords:
    """What the page is made from; none where the person may not see it."""

    view: StoredView
    versions: Sequence[StoredView]
    stored: StoredObject
    owner: str
    nodes: Sequence[LineageNode]
    readers: Sequence[AllowedPrincipal] | None
    reads: Sequence[AuditEntry] | None
    refused: Sequence[AuditEntry] | None


@dataclass(frozen=True)
class Freshness:
    tone: str
    words: str
    ingested: str
    online_tone: str
    online: str


@dataclass(frozen=True)
class VersionRow:
    version: int
    created: str
    rows: str
    changes: str


@dataclass(frozen=True)
class FeatureViewPage:
    name: str
    id: str
    words: str
    about: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str, str], ...]
    aggregations: tuple[tuple[str, str, str, str], ...]
    sql: str
    freshness: Freshness
    versions: tuple[VersionRow, ...]
    invalid_rows: str
    refused: tuple[tuple[str, str, str], ...] | None
    """Refused ingestions: when, by whom, and why; none if the person may not read the audit log."""
    lineage: LineagePicture
    users: tuple[LineageItem, ...]
    readers: tuple[tuple[str, str, str], ...] | None
    reads: tuple[tuple[str, str, str, str], ...] | None


def feature_view_page(records: ViewRecords, *, times: Times, now: datetime) -> FeatureViewPage:
    """Return what the page shows."""
    view, given = records.view, records.view.definition
    picture = lineage_picture(records.nodes, workspace=view.workspace, times=times)
    return FeatureViewPage(
        name=given.name,
        id=view.id,
        words=f"feature view of {', '.join(given.entities)}, version {view.version}",
        about=(
            ("rows", number(view.rows)),
            ("event time", given.event_time),
            ("known at", given.created_time or view.known_at.value.replace("_", " ")),
            ("time to live", duration(given.ttl) if given.ttl else "none: values stay good"),
            ("owner", records.owner),
            ("zone", view.zone),
            ("restriction", view.label.describe()),
            ("table version", "none yet" if view.table_version is None else str(view.table_version)),
            ("id", view.id),
        ),
        columns=tuple(_column(each, "key") for each in view.keys)
        + tuple(_column(each, "") for each in given.columns),
        aggregations=tuple(
            (each.name, each.function.value, each.column, duration(each.window))
            for each in given.aggregations
        ),
        sql=given.sql or "",
        freshness=_freshness(view, records.nodes, times, now),
        versions=_versions(records.versions, times),
        invalid_rows=_invalid_rows(given),
        refused=None if records.refused is None else _refused(records.refused, view.id, times),
        lineage=picture,
        users=tuple(each for each in picture.downstream if each.kind != "quarantine"),
        readers=None
        if records.readers is None
        else tuple((each.principal, each.kind, each.rule) for each in records.readers),
        reads=None if records.reads is None else _reads(records.reads, view.id, times),
    )


def _column(feature: Feature, role: str) -> tuple[str, str, str]:
    label = feature.label
    note = "" if label.only is None and not label.classes else label.describe()
    rules = [shorten(words, limit=RULE_CHARACTERS) for words in feature.rules.values()]
    if feature.max_null_rate is not None:
        rules.append(f"at most {feature.max_null_rate * 100:g} % nulls")
    return feature.name, feature.type.value, " · ".join(part for part in (role, note, *rules) if part)


def _invalid_rows(view: FeatureView) -> str:
    if view.invalid_rows is InvalidRows.REFUSE:
        return "A file with an invalid row is refused as a whole."
    share = f"{view.max_invalid_share * 100:g} %"
    return f"Invalid rows are quarantined. A file is refused if more than {share} of its rows are invalid."


def _freshness(view: StoredView, nodes: Sequence[LineageNode], times: Times, now: datetime) -> Freshness:
    """Say how old the rows are, by the last ingestion in the lineage, and whether the online store has them."""
    moments = [
        node.at for node in nodes if node.depth < 0 and node.name == "features.ingest" and node.at is not None
    ]
    last, ttl = max(moments, default=None), view.definition.ttl
    if last is None:
        tone, words = IDLE, "no rows were ingested yet" if not view.rows else "kept from an earlier version"
    elif ttl is not None and now - last > ttl:
        tone, words = BAD, f"nothing came for {duration(now - last)}, longer than the time to live"
    else:
        tone, words = GOOD, f"rows came {duration(now - last)} ago"
    states = {
        "no": (IDLE, "not written to the online store"),
        "yes": (GOOD, "the online store has the newest rows"),
        "behind": (WAITING, "rows came since the online store was written"),
    }
    online_tone, online = states[online_state(view)]
    return Freshness(tone, words, times.moment(last), online_tone, online)


def _versions(versions: Sequence[StoredView], times: Times) -> tuple[VersionRow, ...]:
    """Return the versions, newest first, each with what is other than in the one before."""
    ordered = sorted(versions, key=lambda each: each.version)
    before = dict(zip([each.version for each in ordered[1:]], ordered, strict=False))
    return tuple(
        VersionRow(
            each.version,
            times.moment(each.created_at),
            number(each.rows),
            "first version"
            if each.version == 1
            else changes(before[each.version].definition, each.definition)
            if each.version in before
            else "",
        )
        for each in reversed(ordered)
    )


def changes(before: FeatureView, after: FeatureView) -> str:
    """Say what is other in a definition: columns by name, other fields by theirs."""
    old, new = _named(before), _named(after)
    found = [f"+ {name}" for name in new if name not in old]
    found += [f"− {name}" for name in old if name not in new]
    found += [f"{name} changed" for name in new if name in old and new[name] != old[name]]
    fields = [name for name in FeatureView.model_fields if name not in ("columns", "aggregations")]
    found += [
        f"{name.replace('_', ' ')} changed"
        for name in fields
        if getattr(before, name) != getattr(after, name)
    ]
    return ", ".join(found) or "nothing but its rows"


def _named(view: FeatureView) -> dict[str, Feature | Aggregation]:
    columns: dict[str, Feature | Aggregation] = {each.name: each for each in view.columns}
    return columns | {each.name: each for each in view.aggregations}


def _refused(entries: Sequence[AuditEntry], view: str, times: Times) -> tuple[tuple[str, str, str], ...]:
    mine = [each for each in entries if view in each.objects]
    return tuple((times.moment(each.at), each.caller, each.error or each.outcome) for each in mine)


def _reads(entries: Sequence[AuditEntry], view: str, times: Times) -> tuple[tuple[str, str, str, str], ...]:
    """Return who read the view: caller, operation, how often, and when last."""
    counts: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], datetime] = {}
    for each in entries:
        if view in each.objects and each.outcome == "done":
            key = (each.caller, each.action)
            counts[key] = counts.get(key, 0) + each.count
            last[key] = max(last.get(key, each.at), each.until or each.at)
    ordered = sorted(last, key=lambda key: last[key], reverse=True)
    return tuple((key[0], key[1], number(counts[key]), times.moment(last[key])) for key in ordered)


# ------------------------------------------------------------------------------------------- drawing


async def load(context: PageContext, name: str) -> FeatureViewPage:
    """Ask the platform, and return what the page shows."""
    reference = f"{context.workspace}/view:{name}"
    view = await context.ask(lambda p: p.features.show(reference))
    older = range(max(1, view.version - SHOWN_VERSIONS + 1), view.version)
    stored, nodes, readers, reads, refused, *versions = await asyncio.gather(
        context.ask(lambda p: p.objects.show(view.id)),
        context.ask(lambda p: [*p.lineage.graph(view.id, depth=DEPTH)]),
        allowed(context, lambda p: p.policies.who_can("features.scan", view.id)),
        allowed(context, lambda p: _audit(p, context.workspace, READS, ("done",))),
        allowed(context, lambda p: _audit(p, context.workspace, ("features.ingest",), ("failed", "denied"))),
        *(context.ask(lambda p, n=n: p.features.show(view.id, version=n)) for n in older),  # type: ignore[misc]
    )
    owner = await allowed(context, lambda p: p.users.show(stored.owner).name)
    records = ViewRecords(
        view, [*versions, view], stored, owner or stored.owner, nodes, readers, reads, refused
    )
    return feature_view_page(records, times=context.times, now=utc_now())


def _audit(
    platform: Platform, workspace: str, actions: Sequence[str], outcomes: Sequence[Outcome]
) -> list[AuditEntry]:
    found: list[AuditEntry] = []
    for action in actions:
        for outcome in outcomes:
            page = platform.audit.list(workspace=workspace, action=action, outcome=outcome, limit=SEARCHED)
            found += page.items
    return sorted(found, key=lambda each: each.at, reverse=True)


async def allowed(context: PageContext, call: Callable[[Platform], T]) -> T | None:
    """Return what an operation answers; none if the person may not perform it."""
    try:
        return await context.ask(call)
    except (Denied, NotFound):
        return None


def draw_view(context: PageContext, view: FeatureViewPage, tab: str, may: frozenset[str]) -> None:
    heading(view.name, above=[Crumb("Features", context.href("features"))], words=view.words)
    tabs(context, TABS, tab)
    with ui.element("div").classes("stack"):
        if tab == "definition":
            _draw_definition(context, view, may)
        elif tab == "lineage":
            _draw_uses(context, view)
        elif tab == "access":
            _draw_access(view)


def _draw_definition(context: PageContext, view: FeatureViewPage, may: frozenset[str]) -> None:
    with ui.element("div").classes("columns flush"):
        with panel("Facts"):
            facts(view.about, mono=("id",))
        with panel("Freshness"):
            with ui.element("div").classes("stack tight-stack"):
                state_badge(view.freshness.words, tone=view.freshness.tone)
                state_badge(view.freshness.online, tone=view.freshness.online_tone)
                facts([("last ingestion", view.freshness.ingested)])
            if view.freshness.online_tone != GOOD:
                _materialize(context, view, may)
    with panel("Columns"):
        small_table(("column", "type", "note"), view.columns, title="Columns")
    if view.aggregations:
        with panel("Features made from them"):
            small_table(("feature", "function", "of", "window"), view.aggregations, title="Aggregations")
    if view.sql:
        with panel("SQL"):
            plain_text(view.sql, height_px=480)
    with ui.element("div").classes("columns flush"):
        with panel("Versions"):
            rows = [(str(each.version), each.created, each.rows, each.changes) for each in view.versions]
            small_table(("version", "since", "rows", "changes"), rows, title="Versions")
        with panel("Refused files", note=view.invalid_rows):
            if view.refused is None:
                ui.label("Who may read the audit log sees the refused files here.").classes("muted")
            elif view.refused:
                small_table(("time", "by", "why"), view.refused, title="Refused ingestions")
            else:
                empty_state("No file was refused lately.", icon="verified")


def _materialize(context: PageContext, view: FeatureViewPage, may: frozenset[str]) -> None:
    action_button(
        context,
        "Write to the online store",
        "features.materialize",
        lambda p: p.features.materialize(view.id),
        may=may,
        done=lambda made: f"{made.written} of {made.keys} keys have a new value online.",
        confirm=f"Write the newest row of every key of {view.name} to the online store? "
        "Endpoints that look it up read it from then on.",
    )


def _draw_uses(context: PageContext, view: FeatureViewPage) -> None:
    with panel("Lineage", note="A click on a node opens its page."):
        draw_lineage(context, view.lineage, title=f"The lineage of {view.name}", start=view.name)
        ui.link("Open the lineage page", context.href("lineage", view.id))
    with ui.element("div").classes("columns flush"):
        with panel("Used by"):
            if view.users:
                draw_tree(context, view.users)
            else:
                empty_state(
                    "Nothing was made from it yet.",
                    command=f"falaj features training-set NAME --spine SPINE --views {view.name}",
                )
        with panel("Read by"):
            if view.reads is None:
                ui.label("Who may read the audit log sees here who read it.").classes("muted")
            elif view.reads:
                small_table(("who", "operation", "times", "last"), view.reads, title="Who read the view")
            else:
                ui.label("Nobody, as far as the newest entries of the audit log say.").classes("muted")


def _draw_access(view: FeatureViewPage) -> None:
    with panel("Who may read its rows", note="By role or policy, for the operation features.scan."):
        if view.readers is None:
            ui.label("You may not see who may read it.").classes("muted")
        elif view.readers:
            small_table(("who", "kind", "by the rule"), view.readers, title="Who may read the view")
        else:
            ui.label("Nobody.").classes("muted")


async def draw(context: PageContext) -> None:
    """Draw the page; the rows for the distributions are read when that tab is opened."""
    name, tab = context.params["view"], chosen_tab(context, TABS)
    may: list[frozenset[str]] = [frozenset()]

    async def loaded() -> FeatureViewPage:
        found = await load(context, name)
        may[0] = await context.may(found.id)
        return found

    await context.region(
        loaded, lambda view: draw_view(context, view, tab, may[0]), events=("features.*", "models.register")
    )
    if tab == "distributions":
        await context.region(
            lambda: _load_distributions(context, name),
            lambda view: draw_distributions(context, view, name),
            events=("features.ingest",),
        )
    elif tab == "quarantine":
        await context.region(
            lambda: load_quarantine(context, f"{context.workspace}/view:{name}"),
            lambda view: draw_quarantine(context, view, name),
            events=("features.*",),
        )


async def _load_distributions(context: PageContext, name: str) -> DistributionsView:
    view = await context.ask(lambda p: p.features.show(f"{context.workspace}/view:{name}"))
    sample = await context.ask(lambda p: read_sample(p, view))
    return distributions(view, sample, times=context.times)


PAGE = ConsolePage(
    "/w/{workspace}/features/{view}",
    "Feature view",
    draw,
    entry="features",
    reads=("features.show", "objects.show", "lineage.graph", "features.scan", "features.quarantined_batches"),
    actions=("features.materialize", "features.ingest_quarantined", "features.discard_quarantined"),
)
