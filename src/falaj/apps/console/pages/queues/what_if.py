"""What-if: a form of other quotas, limits, weights and nodes, and the figures of past jobs with and without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import error_card
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import Times, duration, number
from falaj.errors import FalajError, InvalidInput
from falaj.records.control.workflows import WorkflowState
from falaj.records.record import utc_now
from falaj.records.scheduling.simulation import (
    Changes,
    MoreNodes,
    NewWeight,
    ResourceBound,
    SimulationFigures,
    WhatIfComparison,
)
from falaj.sdk.platform import Platform

GIB = 1 << 30
COLUMNS = (
    TableColumn("queue", "Queue"),
    TableColumn("jobs", "Jobs"),
    TableColumn("mean", "Mean wait"),
    TableColumn("p95", "95th percentile of waits"),
    TableColumn("slowdown", "Slowdown"),
    TableColumn("gpu_use", "GPU use"),
    TableColumn("preempted", "Preempted"),
    TableColumn("gpu_hours", "GPU-hours"),
    TableColumn("cost", "Cost"),
)
KINDS = {
    "quota": "Quota",
    "limit": "Limit",
    "weight": "Weight",
    "add": "Add nodes like",
    "remove": "Remove the node",
}
RESOURCES = {"gpus": "GPUs", "cpus": "CPUs", "memory_bytes": "GiB of memory"}


@dataclass(frozen=True)
class ChangeLine:
    """One line of the form: what is changed, of which queue or node, and its new figure (none: no bound)."""

    kind: str
    subject: str
    resource: str = "gpus"
    amount: float | None = None


@dataclass(frozen=True)
class WhatIfView:
    """The comparison: its rows before → after, the mean waits in minutes, and what the reader must know."""

    heading: str
    changes: tuple[str, ...]
    rows: tuple[TableRow, ...]
    waits: tuple[Bar, ...]
    fairness: str
    words: tuple[str, ...]


def read_changes(lines: Sequence[ChangeLine]) -> Changes:
    """Return the changes of the form; InvalidInput if a line has no figure that it needs."""
    bounds: dict[str, list[ResourceBound]] = {"quota": [], "limit": []}
    weights: list[NewWeight] = []
    more: list[MoreNodes] = []
    for line in lines:
        if line.kind in bounds:
            scale = GIB if line.resource == "memory_bytes" else 1
            amount = None if line.amount is None else round(line.amount * scale)
            bound = {"queue": line.subject, "resource": line.resource, "amount": amount}
            bounds[line.kind].append(ResourceBound.model_validate(bound))
        elif line.kind == "weight":
            if not line.amount or line.amount <= 0:
                raise InvalidInput.at(
                    f"weight of {line.subject}", given=line.amount, allowed="a number above 0"
                )
            weights.append(NewWeight(queue=line.subject, weight=line.amount))
        elif line.kind == "add":
            if line.amount is None or line.amount < 1:
                raise InvalidInput.at(f"nodes like {line.subject}", given=line.amount, allowed="1 or more")
            more.append(MoreNodes(like=line.subject, count=round(line.amount)))
    return Changes(
        quotas=tuple(bounds["quota"]),
        limits=tuple(bounds["limit"]),
        weights=tuple(weights),
        add_nodes=tuple(more),
        remove_nodes=tuple(line.subject for line in lines if line.kind == "remove"),
    )


def what_if_view(found: WhatIfComparison, times: Times) -> WhatIfView:
    """Return what is shown of a comparison."""
    before, after = found.fairness_before.jain, found.fairness_after.jain
    return WhatIfView(
        heading=f"{found.jobs:,} jobs, submitted {times.moment(found.since)} to {times.moment(found.until)}",
        changes=found.changes or ("nothing is changed",),
        rows=(
            *(_row(team.queue, team.before, team.after) for team in found.teams),
            _row("all", found.before, found.after),
        ),
        waits=tuple(
            Bar(f"{team.queue}, {when}", (round(figures.wait.mean / timedelta(minutes=1), 2),))
            for team in found.teams
            for when, figures in (("before", team.before), ("after", team.after))
        ),
        fairness=arrow(f"{before:.3f}", f"{after:.3f}"),
        words=found.words,
    )


def _row(name: str, before: SimulationFigures, after: SimulationFigures) -> TableRow:
    cells = {
        "queue": name,
        "jobs": arrow(f"{before.ended} of {before.jobs} ended", f"{after.ended} of {after.jobs} ended"),
        "mean": arrow(duration(before.wait.mean), duration(after.wait.mean)),
        "p95": arrow(duration(before.wait.p95), duration(after.wait.p95)),
        "slowdown": arrow(f"{before.slowdown:.2f}", f"{after.slowdown:.2f}"),
        "gpu_use": arrow(f"{before.gpu_use:.1%}", f"{after.gpu_use:.1%}"),
        "preempted": arrow(str(before.preemptions), str(after.preemptions)),
        "gpu_hours": arrow(number(before.gpu_hours), number(after.gpu_hours)),
        "cost": arrow(number(before.cost), number(after.cost)),
    }
    return TableRow(name, cells)


def arrow(before: str, after: str) -> str:
    """Return what changed as before → after, or the one value."""
    return before if before == after else f"{before} → {after}"


# ------------------------------------------------------------------------------------------- drawing


class WhatIfForm:
    """The form on an open page: a list of changes, and the result below it."""

    def __init__(self, context: PageContext, queues: Sequence[str], nodes: Sequence[str]) -> None:
        self.context, self.queues, self.nodes = context, queues, nodes
        self.lines: list[ChangeLine] = []

    def draw(self) -> None:
        with ui.element("section").classes("panel spaced").props("data-part=what-if"):
            ui.label("What if?").classes("panel-title").props("role=heading aria-level=2")
            ui.label(
                "Past jobs are replayed on a virtual clock, with and without the changes. Nothing is changed."
            ).classes("muted")
            with ui.element("div").classes("form"):
                self.kind = ui.select(KINDS, value="quota", label="Change", on_change=self._kind_changed)
                self.subject = ui.select([*self.queues], value=self.queues[0], label="Of")
                self.resource = ui.select(RESOURCES, value="gpus", label="Resource")
                self.amount = ui.number("New figure (empty: no bound)", min=0)
                self.days = ui.number("Days of history", value=7, min=1, max=90, precision=0)
                for field in (self.kind, self.subject, self.resource, self.amount, self.days):
                    field.props("outlined dense")
            with ui.element("div").classes("toolbar spaced"):
                ui.button("Add the change", icon="add", on_click=self._add).props("outline dense")
                self.button = ui.button("Replay", icon="play_arrow", on_click=self._replay)
                self.button.props("unelevated dense data-action=queues.what_if")
            self.listed = ui.element("div")
            self.result = ui.element("div")

    def _kind_changed(self) -> None:
        names = self.nodes if self.kind.value in ("add", "remove") else self.queues
        self.subject.set_options([*names], value=names[0] if names else None)
        self.resource.set_visibility(self.kind.value in ("quota", "limit"))
        self.amount.set_visibility(self.kind.value != "remove")

    def _add(self) -> None:
        if self.subject.value is None:
            return
        kind, subject = str(self.kind.value), str(self.subject.value)
        line = ChangeLine(kind, subject, str(self.resource.value), self.amount.value)
        try:
            read_changes([line])
        except InvalidInput as error:
            ui.notify(
                f"{error.message}: {error.faults[0].allowed}" if error.faults else error.message,
                type="negative",
            )
            return
        self.lines.append(line)
        self._list()

    def _list(self) -> None:
        self.listed.clear()
        with self.listed:
            for line in self.lines:
                with ui.element("div").classes("line"):
                    ui.label(change_words(line)).classes("grow")
                    ui.button(icon="close", on_click=lambda line=line: self._drop(line)).props(
                        "flat dense round aria-label='Remove the change'"
                    )

    def _drop(self, line: ChangeLine) -> None:
        self.lines.remove(line)
        self._list()

    async def _replay(self) -> None:
        changes, since = read_changes(self.lines), utc_now() - timedelta(days=int(self.days.value or 7))
        self.button.disable()
        self.result.clear()
        with self.result:
            ui.label("Replaying …").classes("muted").props("role=status")
        try:
            found = await self.context.ask(lambda p: replay(p, changes, since=since))
            view = what_if_view(found, self.context.times)
        except FalajError as error:
            self.result.clear()
            with self.result:
                error_card(error)
            return
        finally:
            self.button.enable()
        self.result.clear()
        with self.result:
            draw_comparison(self.context, view)


def change_words(line: ChangeLine) -> str:
    """Return a change as words."""
    if line.kind == "remove":
        return f"without the node {line.subject}"
    if line.kind == "add":
        return f"{number(line.amount)} more nodes like {line.subject}"
    if line.kind == "weight":
        return f"weight of {line.subject}: {number(line.amount)}"
    figure = "no bound" if line.amount is None else f"{number(line.amount)} {RESOURCES[line.resource]}"
    return f"{line.kind} of {line.subject}: {figure}"


def replay(p: Platform, changes: Changes, *, since: datetime) -> WhatIfComparison:
    """Ask for a replay, wait until it has ended, and return its comparison."""
    work = p.queues.what_if(changes=changes, since=since)
    *_, ended = p.workflows.watch(work.id)
    if ended.state is not WorkflowState.DONE:
        raise InvalidInput(ended.error or f"the replay ended: {ended.state}")
    return p.queues.what_if_result(work.id)


def draw_comparison(context: PageContext, view: WhatIfView) -> None:
    ui.label(view.heading).classes("strong spaced")
    for change in view.changes:
        ui.label(f"• {change}")
    data_table(COLUMNS, view.rows, title="Figures of each queue, before and after")
    if view.waits:
        options = bar_chart(
            view.waits,
            ("mean wait",),
            palette(context.is_dark),
            title="The mean wait of each queue before and after the changes",
            unit="minutes",
        )
        chart(options, height_px=110 + 30 * len(view.waits))
    ui.label(f"Fairness (Jain's index, 1 is even): {view.fairness}")
    for words in view.words:
        ui.label(words).classes("muted small wrap")


async def draw_what_if(context: PageContext) -> None:
    """Draw the form with the queues and nodes that there are."""
    queues = await context.ask(lambda p: [each.name for each in p.queues.list(limit=1000).items])
    nodes = await context.ask(lambda p: [each.node.name for each in p.nodes.list()])
    if queues:
        WhatIfForm(context, queues, nodes).draw()
