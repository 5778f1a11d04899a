"""The endpoints of a workspace: what they serve, how traffic is split, and their load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times
from falaj.records.serving.endpoints import DeployedEndpoint

LISTED = 1000
COLUMNS = (
    TableColumn("name", "Endpoint", "link", sortable=True),
    TableColumn("state", "State", "state", sortable=True),
    TableColumn("model", "Model", sortable=True),
    TableColumn("split", "Traffic"),
    TableColumn("protected", "Protected by"),
    TableColumn("changed", "Routes changed", "time", sortable=True),
)


@dataclass(frozen=True)
class EndpointLine:
    """An endpoint in the list."""

    id: str
    name: str
    state: str
    model: str
    split: str
    protected: str
    changed: str


@dataclass(frozen=True)
class EndpointsView:
    lines: tuple[EndpointLine, ...]


def endpoints_view(endpoints: Sequence[DeployedEndpoint], *, times: Times) -> EndpointsView:
    """Return the endpoints by name."""
    return EndpointsView(
        tuple(
            EndpointLine(
                id=each.id,
                name=each.name,
                state=endpoint_state(each),
                model=each.model,
                split=split_words(each),
                protected=each.protected or "–",
                changed=times.moment(each.changed_at),
            )
            for each in sorted(endpoints, key=lambda each: each.name)
        )
    )


def endpoint_state(endpoint: DeployedEndpoint) -> str:
    """Return whether an endpoint answers: failed if no version does, and ready if all do."""
    if endpoint.problem is not None:
        return "failed"
    problems = [route.problem is not None for route in endpoint.routes if route.weight]
    return "failed" if all(problems) else "error" if any(problems) else "ready"


def split_words(endpoint: DeployedEndpoint) -> str:
    """Return the share of each version in percent, and the shadows."""
    whole = sum(route.weight for route in endpoint.routes)
    words = [
        f"version {route.version}: {100 * route.weight / whole:.0f} %"
        for route in endpoint.routes
        if route.weight
    ]
    words += [
        f"version {route.version}: shadow of {route.shadow} %" for route in endpoint.routes if route.shadow
    ]
    return ", ".join(words)


async def draw(context: PageContext) -> None:
    """Draw the page."""
    ui.label("Endpoints").classes("title").props("role=heading aria-level=1")

    async def load() -> EndpointsView:
        here = context.workspace
        found = await context.ask(lambda p: p.endpoints.list(workspace=here, limit=LISTED).items)
        return endpoints_view(found, times=context.times)

    def draw_view(view: EndpointsView) -> None:
        if not view.lines:
            empty_state(
                "No model is served in this workspace yet.", command="falaj deploy MODEL@1", icon="lan"
            )
            return
        rows = [
            TableRow(
                each.id,
                {column.key: getattr(each, column.key) for column in COLUMNS},
                context.href("endpoints", each.name),
            )
            for each in view.lines
        ]
        data_table(COLUMNS, rows, title="Endpoints")

    await context.region(load, draw_view, events=("endpoints.*",))


PAGE = ConsolePage(
    "/w/{workspace}/endpoints", "Endpoints", draw, entry="endpoints", reads=("endpoints.list",)
)
