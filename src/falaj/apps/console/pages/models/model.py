"""One model: its versions, its aliases with their history, approvals that wait, and rollback."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.listing import LISTED, read_all
from falaj.apps.console.components.sections import Cell, Crumb, heading, panel, small_table
from falaj.apps.console.components.states import BAD, GOOD, IDLE, WAITING, empty_state, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.models.catalogue import number_of
from falaj.apps.console.times import Times, number, size
from falaj.errors import Denied, NotFound
from falaj.records.control.workflows import WorkflowRun
from falaj.records.registry import Alias, AliasChange, AliasMove, Approval, Model, ModelVersion
from falaj.sdk.platform import Platform

SHOWN_VERSIONS, SHOWN_MOVES, SHOWN_METRICS = 200, 20, 4
CANDIDATES = 3
"""Versions newer than a protected alias's own that are looked at for approvals."""
WAITS = re.compile(r"waits for approval: falaj models approve (?P<version>\S+) --alias (?P<alias>[a-z0-9.]+)")
"""What a canary says while it waits."""
EVENTS = ("models.*", "pipelines.*", "workflows.*")


@dataclass(frozen=True)
class ModelRecords:
    """What the page is made from; `approvals` and whether gates are passed are of the candidates alone."""

    model: Model
    versions: Sequence[ModelVersion]
    more: bool
    histories: Mapping[str, Sequence[AliasChange]]
    approvals: Mapping[tuple[str, str], Sequence[Approval]]
    passes: Mapping[tuple[str, str], bool]
    work: Sequence[WorkflowRun]
    people: Mapping[str, str]


@dataclass(frozen=True)
class VersionLine:
    number: int
    created: str
    author: str
    format: str
    size: str
    metrics: str
    aliases: str


@dataclass(frozen=True)
class AliasView:
    """An alias: where it points, its moves, and what a rollback would change."""

    alias: str
    version: str
    since: str
    protection: str
    moves: tuple[tuple[str, str, str, str, str], ...]
    """When, which move, to which version, from which, by whom with whose approval."""
    back_to: str
    compared: tuple[tuple[str, str, str], ...]
    """Metrics of the version that a rollback leaves, and of the one that it returns to."""


@dataclass(frozen=True)
class WaitingApproval:
    version: str
    alias: str
    words: str
    passes: bool


@dataclass(frozen=True)
class ModelView:
    name: str
    id: str
    words: str
    versions: tuple[VersionLine, ...]
    more: bool
    aliases: tuple[AliasView, ...]
    waiting: tuple[WaitingApproval, ...]


def model_view(records: ModelRecords, *, times: Times) -> ModelView:
    """Return what the page shows."""
    model = records.model
    pointing: dict[str, list[str]] = {}
    for each in model.aliases:
        pointing.setdefault(each.version or "", []).append(each.alias)
    count = "1 version" if model.versions == 1 else f"{number(model.versions)} versions"
    return ModelView(
        name=model.name,
        id=model.id,
        words=f"model with {count}, since {times.day(model.created_at)}",
        versions=tuple(
            VersionLine(
                number=each.number,
                created=times.moment(each.created_at),
                author=records.people.get(each.author, each.author),
                format=each.format.value,
                size=size(each.size_bytes),
                metrics=_metrics(each.metrics),
                aliases=", ".join(pointing.get(each.reference, ())),
            )
            for each in records.versions
        ),
        more=records.more,
        aliases=tuple(_alias(each, records, times) for each in model.aliases),
        waiting=waiting_approvals(records),
    )


def _metrics(metrics: Mapping[str, float]) -> str:
    shown = sorted(metrics.items())[:SHOWN_METRICS]
    more = f" and {len(metrics) - SHOWN_METRICS} more" if len(metrics) > SHOWN_METRICS else ""
    return ", ".join(f"{name} {number(value)}" for name, value in shown) + more


def _alias(alias: Alias, records: ModelRecords, times: Times) -> AliasView:
    moves = records.histories.get(alias.alias, ())
    newest = moves[0] if moves else None
    back_to = ""
    if newest is not None and newest.move is AliasMove.PROMOTE and newest.previous is not None:
        back_to = newest.previous
    metrics = {each.reference: each.metrics for each in records.versions}
    left, right = metrics.get(alias.version or "", {}), metrics.get(back_to, {})
    if alias.independent:
        protection = "protected, approver independent of the authors"
    else:
        protection = "protected" if alias.protected else "not protected"
    return AliasView(
        alias=alias.alias,
        version=alias.version or "",
        since=times.moment(alias.since),
        protection=protection,
        moves=tuple(_move(each, times) for each in moves),
        back_to=back_to,
        compared=tuple(
            (name, number(left.get(name)), number(right.get(name))) for name in sorted({*left, *right})
        )
        if back_to
        else (),
    )


def _move(change: AliasChange, times: Times) -> tuple[str, str, str, str, str]:
    approved = change.evidence.approved_by if change.evidence is not None else ()
    by = change.by + (f", approved by {', '.join(approved)}" if approved else "")
    return times.moment(change.at), change.move.value, change.version, change.previous or "–", by


def waiting_approvals(records: ModelRecords) -> tuple[WaitingApproval, ...]:
    """Return the approvals that canaries wait for, and newer versions that a protected alias could move to."""
    found: dict[tuple[str, str], WaitingApproval] = {}
    for name, alias in canaries_waiting(records.work):
        if name.rpartition("@")[0] == records.model.name:
            found[name, alias] = WaitingApproval(name, alias, "a canary waits for it", True)
    for each in records.model.aliases:
        if each.protected:
            for version in candidates(each, records.versions):
                key = (version.reference, each.alias)
                if not records.approvals.get(key) and key not in found:
                    words = f"newer than {each.version}" if each.version else "the alias points nowhere yet"
                    passes = records.passes.get(key, True)
                    words += "" if passes else "; it fails the gates of the alias"
                    found[key] = WaitingApproval(*key, words, passes)
    return tuple(found.values())


def candidates(alias: Alias, versions: Sequence[ModelVersion]) -> list[ModelVersion]:
    """Return the newest versions that are newer than the one that an alias points at."""
    current = int(number_of(alias.version) or 0)
    return [each for each in versions if each.number > current][:CANDIDATES]


def canaries_waiting(work: Sequence[WorkflowRun]) -> list[tuple[str, str]]:
    """Return versions and aliases for which running canaries wait."""
    said = [WAITS.match(each.doing or "") for each in work if not each.state.ended]
    return [(each["version"], each["alias"]) for each in said if each is not None]


# ------------------------------------------------------------------------------------------- drawing


async def load(context: PageContext, name: str) -> ModelView:
    """Ask the platform, and return what the page shows."""
    reference = f"{context.workspace}/{name}"
    return await context.ask(
        lambda p: model_view(read_records(p, context.workspace, reference), times=context.times)
    )


def read_records(platform: Platform, workspace: str, reference: str) -> ModelRecords:
    """Ask the platform for all that the page is made from."""
    model = platform.models.show(reference)
    versions = platform.models.versions(model.id, limit=SHOWN_VERSIONS)
    histories = {
        each.alias: platform.models.alias_history(model.id, alias=each.alias, limit=SHOWN_MOVES).items
        for each in model.aliases
    }
    approvals = {
        (version.reference, each.alias): platform.models.approvals(version.id, alias=each.alias).items
        for each in model.aliases
        if each.protected
        for version in candidates(each, versions.items)
    }
    passes = {
        key: platform.models.check_gates(f"{workspace}/{key[0]}", alias=key[1]).passed
        for key, found in approvals.items()
        if not found
    }
    people: dict[str, str] = {each.author: "" for each in versions.items}
    people = {author: _name(platform, author) for author in people}
    return ModelRecords(
        model=model,
        versions=versions.items,
        more=versions.next is not None,
        histories=histories,
        approvals=approvals,
        passes=passes,
        work=_work(platform, workspace),
        people=people,
    )


def _work(platform: Platform, workspace: str) -> Sequence[WorkflowRun]:
    try:
        return read_all(platform, lambda p, at: p.workflows.list(workspace=workspace, after=at, limit=LISTED))
    except (Denied, NotFound):
        return ()


def _name(platform: Platform, ident: str) -> str:
    try:
        return platform.users.show(ident).name
    except (Denied, NotFound):
        return ident


COLUMNS = (
    TableColumn("version", "Version", kind="link", sortable=True),
    TableColumn("aliases", "Aliases"),
    TableColumn("metrics", "Metrics"),
    TableColumn("author", "Author", sortable=True),
    TableColumn("format", "Format", sortable=True),
    TableColumn("size", "Size"),
    TableColumn("created", "Registered", sortable=True),
)


class ModelPage:
    """An open page of a model."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.name = context.params["model"]
        self.may: frozenset[str] = frozenset()

    async def load(self) -> ModelView:
        found = await load(self.context, self.name)
        self.may = await self.context.may(found.id)
        return found

    async def draw(self) -> None:
        self.region = await self.context.region(self.load, self.show, events=EVENTS)

    def show(self, view: ModelView) -> None:
        above = [Crumb("Models", self.context.href("models"))]
        heading(view.name, above=above, words=view.words)
        with ui.element("div").classes("stack"):
            self._waiting(view)
            self._aliases(view)
            self._versions(view)

    def _waiting(self, view: ModelView) -> None:
        if not view.waiting:
            return
        with panel("Approvals that wait"):
            for each in view.waiting:
                with ui.element("div").classes("tree-row"):
                    state_badge("waits" if each.passes else "refused", tone=WAITING if each.passes else BAD)
                    ui.link(f"{each.version} for {each.alias}", self._page(each.version, each.alias))
                    ui.label(each.words).classes("muted small")

    def _aliases(self, view: ModelView) -> None:
        if not view.aliases:
            with panel("Aliases"):
                empty_state(
                    "No alias points at a version.",
                    command=f"falaj models promote {view.name}@{len(view.versions) or 1} --to champion",
                    icon="label",
                )
        for each in view.aliases:
            with panel(each.alias):
                with ui.element("div").classes("toolbar"):
                    state_badge(each.protection, tone=GOOD if each.protection != "not protected" else IDLE)
                    if each.version:
                        ui.link(each.version, self._page(each.version, each.alias)).classes("strong")
                        ui.label(f"since {each.since}").classes("muted small")
                    self._rollback(view, each)
                heads = ("time", "move", "to", "from", "by")
                rows = [
                    (at, move, Cell(to, self._page(to)), before, by)
                    for at, move, to, before, by in each.moves
                ]
                small_table(heads, rows, title=f"History of {each.alias}")

    def _rollback(self, view: ModelView, each: AliasView) -> None:
        """Draw the button with what it changes beside it, if there is something to return to."""
        if not each.back_to or "models.rollback" not in self.may:
            return
        apart = ", ".join(f"{name} {old} → {new}" for name, old, new in each.compared)
        action_button(
            self.context,
            f"Roll back to {each.back_to}",
            "models.rollback",
            lambda p: p.models.rollback(view.id, alias=each.alias),
            may=self.may,
            done=lambda made: f"{each.alias} is {made.change.version} again.",
            confirm=f"Point {each.alias} of {view.name} back at {each.back_to}? {each.version} leaves it, and needs a "
            f"new approval to return. {f'Metrics: {apart}.' if apart else ''}",
            after=self.region_refresh,
        )
        if apart:
            ui.label(f"a rollback changes {apart}").classes("muted small wrap")
        before, after = number_of(each.version), number_of(each.back_to)
        ui.link("differences", self.context.href("models", view.name, "diff", before=before, after=after))

    async def region_refresh(self) -> None:
        await self.region.refresh()

    def _versions(self, view: ModelView) -> None:
        with panel("Versions"):
            rows = [
                TableRow(
                    str(each.number),
                    {
                        "version": each.number,
                        **{name: getattr(each, name) for name in VersionLine.__dataclass_fields__},
                    },
                    self.context.href("models", view.name, "versions", str(each.number)),
                )
                for each in view.versions
            ]
            data_table(COLUMNS, rows, title="Versions")
            if view.more:
                ui.label(f"The newest {len(view.versions)} are shown.").classes("muted small")
            if len(view.versions) > 1:
                newest, older = view.versions[0].number, view.versions[1].number
                ui.link(
                    "Compare two versions",
                    self.context.href("models", view.name, "diff", before=str(older), after=str(newest)),
                ).classes("choice gap-above apart")

    def _page(self, reference: str, alias: str = "") -> str:
        return self.context.href("models", self.name, "versions", number_of(reference), alias=alias)


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await ModelPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/models/{model}",
    "Model",
    draw,
    entry="models",
    reads=(
        "models.show",
        "models.versions",
        "models.alias_history",
        "models.approvals",
        "workflows.list",
        "models.check_gates",
    ),
    actions=("models.rollback",),
)
