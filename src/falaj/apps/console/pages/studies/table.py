"""The studies of a workspace: how far each is, and the best value so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times, number
from falaj.records.tuning import Study

LISTED = 1000
FOLLOW_S = 2.0
COLUMNS = (
    TableColumn("name", "Study", "link", sortable=True),
    TableColumn("state", "State", "state", sortable=True),
    TableColumn("trials", "Trials", "number"),
    TableColumn("best", "Best", "number"),
    TableColumn("metric", "Metric"),
    TableColumn("sampler", "Sampler"),
    TableColumn("created", "Created", "time", sortable=True),
)


@dataclass(frozen=True)
class StudyLine:
    """A study in the list."""

    id: str
    name: str
    state: str
    trials: str
    best: str
    metric: str
    sampler: str
    created: str


@dataclass(frozen=True)
class StudiesView:
    lines: tuple[StudyLine, ...]


def studies_view(studies: Sequence[Study], *, times: Times) -> StudiesView:
    """Return the studies, newest first."""
    lines = tuple(
        StudyLine(
            id=each.id,
            name=each.name,
            state=str(each.state),
            trials=f"{each.finished} of {each.settings.planned}",
            best=", ".join(number(value) for value in each.best[0].values) if each.best else "–",
            metric=", ".join(f"{one.metric} ({one.direction})" for one in each.settings.objectives),
            sampler=each.settings.sampler,
            created=times.moment(each.created_at),
        )
        for each in sorted(studies, key=lambda each: each.created_at, reverse=True)
    )
    return StudiesView(lines)


async def draw(context: PageContext) -> None:
    """Draw the page."""
    ui.label("Tuning studies").classes("title").props("role=heading aria-level=1")

    async def load() -> StudiesView:
        here = context.workspace
        studies = await context.ask(lambda p: p.studies.list(workspace=here, limit=LISTED).items)
        return studies_view(studies, times=context.times)

    def draw_view(view: StudiesView) -> None:
        if not view.lines:
            empty_state(
                "No study was started in this workspace yet.",
                command="falaj tune train.py --space space.toml --metric val_loss",
                icon="tune",
            )
            return
        rows = [
            TableRow(
                each.id,
                {column.key: getattr(each, column.key) for column in COLUMNS},
                context.href("studies", each.id),
            )
            for each in view.lines
        ]
        data_table(COLUMNS, rows, title="Studies")

    await context.region(load, draw_view, events=("studies.*",), gather_s=FOLLOW_S)


PAGE = ConsolePage("/w/{workspace}/studies", "Tuning studies", draw, entry="runs", reads=("studies.list",))
