"""One endpoint: traffic split, live latency and throughput, canary, shadows, a form to try it, and rolling back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import TONES, empty_state, fact, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.endpoints.canary import CanaryView, canary_view, draw_canary
from falaj.apps.console.pages.endpoints.table import endpoint_state
from falaj.apps.console.pages.endpoints.traffic import TrafficPanel
from falaj.apps.console.pages.endpoints.try_it import TryForm, draw_form, try_form
from falaj.apps.console.times import Times, number
from falaj.errors import Denied, NotFound
from falaj.records.control.pipelines import CanaryProgress
from falaj.records.record import utc_now
from falaj.records.registry import ModelVersion
from falaj.records.serving.endpoints import DeployedEndpoint, Route
from falaj.records.serving.shadows import ShadowReport
from falaj.records.serving.statistics import EndpointStats
from falaj.sdk.platform import Platform

ACTIONS = ("endpoints.route", "endpoints.infer", "workflows.cancel")
FOLLOW_S = 5.0
"""An endpoint is loaded again at most this often while requests are counted: the evidence on a canary asks for much."""
DAY = timedelta(days=1)
STATS_COLUMNS = (
    TableColumn("version", "Version"),
    TableColumn("requests", "Requests", "number"),
    TableColumn("errors", "Errors", "number"),
    TableColumn("p50", "p50 [ms]", "number"),
    TableColumn("p99", "p99 [ms]", "number"),
    TableColumn("labelled", "Labelled rows", "number"),
    TableColumn("score", "Mean score", "number"),
)
SHADOW_COLUMNS = (
    TableColumn("version", "Shadow"),
    TableColumn("against", "Beside"),
    TableColumn("requests", "Requests", "number"),
    TableColumn("errors", "Errors", "number"),
    TableColumn("dropped", "Dropped", "number"),
    TableColumn("p99", "p99 [ms], beside", "number"),
    TableColumn("difference", "Mean difference", "number"),
    TableColumn("disagreement", "Other class", "number"),
)


@dataclass(frozen=True)
class EndpointRecords:
    """What the page is made from; none where the person may not see it, or there is none."""

    endpoint: DeployedEndpoint
    stats: EndpointStats | None = None
    canary: CanaryProgress | None = None
    shadows: ShadowReport | None = None
    version: ModelVersion | None = None
    """The version with the largest weight."""


@dataclass(frozen=True)
class RouteLine:
    """A route: its version, its share of the requests in percent, what else it does, and why it is not served."""

    version: str
    share: float
    notes: str
    problem: str


@dataclass(frozen=True)
class StatsLine:
    """A version in the last day."""

    version: str
    requests: str
    errors: str
    p50: str
    p99: str
    labelled: str
    score: str


@dataclass(frozen=True)
class ShadowLine:
    """A shadow beside a version that answered."""

    version: str
    against: str
    requests: str
    errors: str
    dropped: str
    p99: str
    difference: str
    disagreement: str


@dataclass(frozen=True)
class EndpointView:
    """What the page shows."""

    id: str
    name: str
    model: str
    state: str
    problem: str
    routes: tuple[RouteLine, ...]
    current: tuple[tuple[str, int, int, bool], ...]
    """Version, weight, shadow and fallback of each route, for the form that changes them."""
    previous: tuple[tuple[str, int, int, bool], ...]
    previous_words: str
    facts: tuple[tuple[str, str], ...]
    stats: tuple[StatsLine, ...]
    scoring: str
    shadows: tuple[ShadowLine, ...]
    canary: CanaryView | None
    form: TryForm


def endpoint_view(records: EndpointRecords, *, times: Times) -> EndpointView:
    """Return what the page shows of an endpoint."""
    found = records.endpoint
    whole = sum(route.weight for route in found.routes)
    stats = records.stats.versions if records.stats else ()
    scoring = str(records.stats.scoring or "") if records.stats else ""
    return EndpointView(
        id=found.id,
        name=found.name,
        model=found.model,
        state=endpoint_state(found),
        problem=found.problem or "",
        routes=tuple(
            RouteLine(
                route.version,
                round(100 * route.weight / whole, 1),
                ", ".join(
                    words
                    for words in (
                        f"shadow of {route.shadow} %" if route.shadow else "",
                        "fallback" if route.fallback else "",
                    )
                    if words
                ),
                route.problem or "",
            )
            for route in found.routes
        ),
        current=tuple((each.version, each.weight, each.shadow, each.fallback) for each in found.routes),
        previous=tuple((each.version, each.weight, each.shadow, each.fallback) for each in found.previous),
        previous_words=_split([(each.version, each.weight) for each in found.previous]),
        facts=(
            ("address", found.url or "–"),
            ("gRPC", found.grpc or "–"),
            ("zone", found.zone or "–"),
            ("sticky key", found.sticky or "–"),
            ("protected by", found.protected or "–"),
            ("routes changed", times.moment(found.changed_at)),
            (
                "lookup",
                ", ".join(each.name or each.view for each in found.lookup.views) if found.lookup else "–",
            ),
        ),
        stats=tuple(
            StatsLine(
                version=each.version,
                requests=f"{each.requests:,}",
                errors=f"{each.errors:,}",
                p50=number(each.p50_ms),
                p99=number(each.p99_ms),
                labelled=f"{each.labelled:,}",
                score=number(each.score_mean),
            )
            for each in stats
        ),
        scoring=scoring.replace("_", " "),
        shadows=_shadows(records.shadows),
        canary=canary_view(records.canary, times=times),
        form=try_form(found, records.version),
    )


def _shadows(report: ShadowReport | None) -> tuple[ShadowLine, ...]:
    lines = []
    for each in report.differences if report else ():
        means = [one.mean_difference for one in each.outputs if one.mean_difference is not None]
        classes = [one.disagreement for one in each.outputs if one.disagreement is not None]
        lines.append(
            ShadowLine(
                version=each.version,
                against=each.against,
                requests=f"{each.requests:,}",
                errors=f"{each.errors:,}",
                dropped=f"{each.dropped:,}",
                p99=f"{number(each.p99_ms)}, {number(each.against_p99_ms)}",
                difference=number(max(means)) if means else "–",
                disagreement=f"{100 * max(classes):.2f} %" if classes else "–",
            )
        )
    return tuple(lines)


def _split(weights: Sequence[tuple[str, int]]) -> str:
    whole = sum(weight for _, weight in weights)
    return ", ".join(
        f"{100 * weight / whole:.0f} % to version {version}" for version, weight in weights if weight
    )


# ------------------------------------------------------------------------------------------- drawing


def _records(platform: Platform, endpoint: str) -> EndpointRecords:
    found = platform.endpoints.show(endpoint)
    first = max(found.routes, key=lambda route: route.weight)
    stats = canary = shadows = version = None
    try:
        stats = platform.endpoints.stats(found.id, since=utc_now() - DAY)
        version = platform.models.version(first.id)
        if any(route.shadow for route in found.routes):
            shadows = platform.endpoints.shadow_report(found.id)
        canary = platform.pipelines.canary_progress(found.id)
    except (Denied, NotFound):
        pass
    return EndpointRecords(found, stats, canary, shadows, version)


class EndpointPage:
    """The open page of one endpoint."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.endpoint = f"{context.workspace}/{context.params['endpoint']}"
        self.may: frozenset[str] = frozenset()

    async def load(self) -> EndpointView:
        """Ask for the endpoint and all that belongs to it."""
        found = await self.context.ask(lambda p: _records(p, self.endpoint))
        return endpoint_view(found, times=self.context.times)

    async def draw(self) -> None:
        context = self.context
        first = await self.load()
        self.endpoint = first.id
        self.may = await context.may(first.id)
        self.region = await context.region(
            self.load,
            self._draw_view,
            events=("endpoints.*", "pipelines.*"),
            objects=lambda view: (view.id,),
            gather_s=FOLLOW_S,
        )
        TrafficPanel(context, first.name).draw()
        if "endpoints.infer" in self.may:
            with ui.element("section").classes("panel").style("margin-top: 16px").props("data-part=try"):
                ui.label("Try it").classes("panel-title").props("role=heading aria-level=2")
                draw_form(context, first.id, first.form)

    async def _refresh(self) -> None:
        await self.region.refresh()

    def _draw_view(self, view: EndpointView) -> None:
        context = self.context
        with ui.element("div").classes("toolbar"):
            ui.label(view.name).classes("title wrap").style("margin: 0").props("role=heading aria-level=1")
            state_badge(view.state, tone=TONES.get(view.state))
            ui.link(f"model {view.model}", context.href("models", view.model)).classes("wrap")
            ui.element("div").classes("grow")
            self._buttons(view)
        if view.problem:
            ui.label(view.problem).classes("panel wrap")
        with ui.element("div").classes("columns").style("margin-top: 0"):
            with _panel("Traffic split"):
                self._draw_split(view)
            with _panel("Facts"), ui.element("dl").classes("facts"):
                for name, value in view.facts:
                    fact(name, value, mono=name in ("address", "gRPC"))
        with _panel("Last 24 hours"):
            if not view.stats:
                empty_state(
                    "No request was answered yet.",
                    command=f"falaj endpoints infer {view.name} …",
                    icon="bolt",
                )
            else:
                _table(STATS_COLUMNS, view.stats, title="Versions in the last 24 hours")
                if view.scoring:
                    ui.label(f"Scores are {view.scoring}: less is better.").classes("muted small")
        with _panel("Canary").props("data-part=canary"):
            if view.canary is None:
                empty_state(
                    "No version was tried as a canary.",
                    command=f"falaj pipelines canary {view.name} --model {view.model}@N",
                    icon="science",
                )
            else:
                draw_canary(context, view.canary)
        if view.shadows:
            with _panel("Shadows"):
                _table(SHADOW_COLUMNS, view.shadows, title="Shadows beside the versions that answered")

    def _buttons(self, view: EndpointView) -> None:
        context = self.context
        if view.previous:
            routes = tuple(
                Route(version=version, weight=weight, shadow=shadow, fallback=fallback)
                for version, weight, shadow, fallback in view.previous
            )
            action_button(
                context,
                "Roll back",
                "endpoints.route",
                lambda p: p.endpoints.route(view.id, routes=routes),
                may=self.may,
                done=f"Routed back: {view.previous_words}",
                confirm=f"Return to the routes before the last change? Requests of {view.name} then go: "
                f"{view.previous_words}. A canary that is under way ends undecided.",
                icon="undo",
                after=self._refresh,
            )
        if "endpoints.route" in self.may:
            ui.button("Change traffic", icon="alt_route", on_click=lambda: self._change(view)).props(
                "outline dense data-action=endpoints.route"
            )
        if view.canary is not None and view.canary.work:
            work = view.canary.work
            action_button(
                context,
                "Cancel canary",
                "workflows.cancel",
                lambda p: p.workflows.cancel(work),
                may=self.may,
                done="The canary ends, and the champion gets all requests again",
                confirm="Cancel the canary? The champion gets all requests again, and there is no verdict.",
                icon="stop",
                after=self._refresh,
            )

    async def _change(self, view: EndpointView) -> None:
        """Ask for the weight of each version, and route by them."""
        with self.context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
            ui.label(f"Traffic of {view.name}").classes("state-title")
            ui.label("Weights are shares of the requests; 0 answers only who asks for that version.").classes(
                "muted"
            )
            boxes = [
                (version, shadow, fallback, _weight_box(f"version {version}", weight, is_off=bool(shadow)))
                for version, weight, shadow, fallback in view.current
            ]
            with ui.element("div").classes("toolbar"):
                added = ui.input("Another version").props("dense outlined").style("width: 160px")
                extra = _weight_box("its weight", 0, is_off=False)
            with ui.row():
                ui.button("Route", on_click=lambda: dialog.submit(True)).props("unelevated")
                ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat autofocus")
        answer = await dialog
        chosen = [(version, shadow, fallback, box.value) for version, shadow, fallback, box in boxes]
        if str(added.value or "").strip():
            chosen.append((str(added.value).strip(), 0, False, extra.value))
        dialog.delete()
        if not answer:
            return

        def route(platform: Platform) -> DeployedEndpoint:
            routes = tuple(
                Route(version=version, weight=int(weight or 0), shadow=shadow, fallback=fallback)
                for version, shadow, fallback, weight in chosen
            )
            return platform.endpoints.route(view.id, routes=routes)

        await self.context.act(route, done="The routes are changed")
        await self.region.refresh()

    def _draw_split(self, view: EndpointView) -> None:
        bars = [Bar(f"version {route.version}", (route.share,)) for route in view.routes]
        title = "Share of requests: " + ", ".join(f"{each.name} {each.parts[0]:g} %" for each in bars)
        options = bar_chart(
            bars, ("share of requests",), palette(self.context.is_dark), title=title, unit="%"
        )
        options["xAxis"] |= {"min": 0, "max": 100, "name": "share of requests [%]"}
        for series in options["series"]:
            label = {"show": True, "position": "insideLeft", "formatter": "{c} %", "color": "#fff"}
            series["label"] = label if not self.context.is_dark else label | {"color": "#10201f"}
        chart(options, height_px=90 + 36 * len(bars))
        for route in view.routes:
            if route.notes:
                ui.label(f"version {route.version}: {route.notes}").classes("muted small")
            if route.problem:
                ui.label(f"version {route.version} is not served: {route.problem}").classes("small wrap")


def _weight_box(label: str, weight: int, *, is_off: bool) -> ui.number:
    box = ui.number(label, value=weight, min=0, max=1000, precision=0).props("dense outlined")
    box.style("width: 160px")
    if is_off:
        box.disable()
    return box


def _table(columns: Sequence[TableColumn], lines: Sequence[object], *, title: str) -> None:
    rows = [
        TableRow(str(at), {column.key: getattr(line, column.key) for column in columns})
        for at, line in enumerate(lines)
    ]
    data_table(columns, rows, title=title)


def _panel(title: str) -> ui.element:
    with ui.element("section").classes("panel").style("margin-top: 16px") as panel:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return panel


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await EndpointPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/endpoints/{endpoint}",
    "Endpoint",
    draw,
    entry="endpoints",
    reads=(
        "endpoints.show",
        "endpoints.stats",
        "endpoints.load",
        "endpoints.shadow_report",
        "pipelines.canary_progress",
        "models.version",
    ),
    actions=ACTIONS,
)
