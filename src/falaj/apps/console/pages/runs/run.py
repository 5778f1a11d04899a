"""One run: live curves, parameters, tags, datasets, artifacts, code and environment, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nicegui import ui

from falaj.apps.console.components.actions import action_button, ask_first
from falaj.apps.console.components.states import empty_state, fact, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, Drawing, PageContext
from falaj.apps.console.pages.runs.artifacts import (
    ArtifactView,
    artifact_view,
    bytes_needed,
    draw_artifact,
    kind_of,
    stored_table_view,
)
from falaj.apps.console.pages.runs.curves import FOLLOW_S, CurvePanel, CurveQuery
from falaj.apps.console.times import Times, duration, number, size
from falaj.errors import Denied, FalajError, NotFound, Unauthenticated
from falaj.records.governance.events import Event
from falaj.records.governance.lineage import Direction, LineageNode
from falaj.records.tracking import INT64_MAX, INT64_MIN, Experiment, MetricCurve, RunDetails
from falaj.sdk.platform import Platform

ACTIONS = ("runs.update", "runs.set_tags", "runs.delete_tags", "runs.delete", "runs.restore")
EVENTS = ("runs.*", "models.register")
JOB_TAG = "falaj.job"
CODE_TAGS = {
    "git.commit": "commit",
    "mlflow.source.git.commit": "commit",
    "mlflow.source.git.branch": "branch",
    "mlflow.source.git.repoURL": "repository",
    "mlflow.source.name": "program",
    "mlflow.source.type": "kind of source",
    "mlflow.user": "user of the client",
    "falaj.image": "image",
}
"""Tags that say what ran; they are shown as facts."""
CODE_PARAMS = {"job.command": "command", "job.framework": "framework"}
ENVIRONMENT = ("environment.txt", "requirements.txt", "conda.yaml", "python_env.yaml")
"""Artifacts that say what was installed."""
VALUE_CHARACTERS = 500
SHOWN_ARTIFACTS = 200


@dataclass(frozen=True)
class RunRecords:
    """What the page is made from; none or empty where the person may not see it."""

    details: RunDetails
    experiment: Experiment | None = None
    made: Sequence[LineageNode] = ()
    """What came of the run, by lineage."""
    people: Mapping[str, str] = field(default_factory=dict)
    """Names of people by id."""


@dataclass(frozen=True)
class NamedValue:
    """A name and its value, both of people."""

    name: str
    value: str


@dataclass(frozen=True)
class RunLink:
    """Where something else is: the words of a link, and its address below the workspace."""

    words: str
    target: tuple[str, ...]


@dataclass(frozen=True)
class MetricLine:
    """A metric in figures."""

    key: str
    last: str
    low: str
    high: str
    step: str
    points: str


@dataclass(frozen=True)
class ArtifactLine:
    """An artifact in the list."""

    path: str
    size_bytes: int
    kind: str


@dataclass(frozen=True)
class RunView:
    """What the page shows beside the curves."""

    id: str
    name: str
    status: str
    is_running: bool
    is_deleted: bool
    facts: tuple[NamedValue, ...]
    metric_keys: tuple[str, ...]
    metrics: tuple[MetricLine, ...]
    params: tuple[NamedValue, ...]
    tags: tuple[NamedValue, ...]
    datasets: tuple[tuple[str, ...], ...]
    artifacts: tuple[ArtifactLine, ...]
    more_artifacts: int
    code: tuple[NamedValue, ...]
    environment: tuple[str, ...]
    links: tuple[RunLink, ...]


def run_view(records: RunRecords, *, times: Times) -> RunView:
    """Return what the page shows of a run."""
    found, run = records.details, records.details.run
    tags = {each.key: each.value for each in found.tags}
    params = {each.key: each.value for each in found.params}
    code = [NamedValue(words, tags[key]) for key, words in CODE_TAGS.items() if key in tags]
    code += [NamedValue(words, params[key]) for key, words in CODE_PARAMS.items() if key in params]
    took = None if run.ended_at is None else run.ended_at - run.started_at
    facts = (
        NamedValue("experiment", records.experiment.name if records.experiment else run.experiment),
        NamedValue("started", times.moment(run.started_at)),
        NamedValue("ended", times.moment(run.ended_at)),
        NamedValue("duration", duration(took)),
        NamedValue("owner", run.user or records.people.get(run.owner, run.owner)),
        NamedValue("id", run.id),
        *([NamedValue("deleted", times.moment(run.deleted_at))] if run.deleted_at else []),
    )
    return RunView(
        id=run.id,
        name=run.name,
        status=str(run.status),
        is_running=not run.status.ended and run.deleted_at is None,
        is_deleted=run.deleted_at is not None,
        facts=facts,
        metric_keys=tuple(each.key for each in found.metrics),
        metrics=tuple(
            MetricLine(
                each.key,
                number(each.last),
                number(each.low),
                number(each.high),
                f"{each.last_step:,}",
                f"{each.points:,}",
            )
            for each in found.metrics
        ),
        params=tuple(NamedValue(each.key, _short(each.value)) for each in found.params),
        tags=tuple(NamedValue(each.key, _short(each.value)) for each in found.tags),
        datasets=tuple(
            (each.name, each.tags.get("mlflow.data.context", ""), each.digest, each.source_type)
            for each in found.datasets
        ),
        artifacts=tuple(
            ArtifactLine(each.path, each.size_bytes, kind_of(each.path))
            for each in found.artifacts[:SHOWN_ARTIFACTS]
        ),
        more_artifacts=max(0, len(found.artifacts) - SHOWN_ARTIFACTS),
        code=tuple(dict.fromkeys(code)),
        environment=tuple(
            each.path for each in found.artifacts if each.path.rpartition("/")[2] in ENVIRONMENT
        ),
        links=_links(records, tags),
    )


def _links(records: RunRecords, tags: dict[str, str]) -> tuple[RunLink, ...]:
    """Return where the job, the parent and the models of a run are."""
    run = records.details.run
    links = [RunLink("Job", ("jobs", tags[JOB_TAG]))] if JOB_TAG in tags else []
    if run.parent is not None:
        links.append(RunLink("Parent run", ("runs", run.parent)))
    for node in records.made:
        if node.kind == "model_version":
            model, _, version = node.name.partition("@")
            links.append(RunLink(f"Model {node.name}", ("models", model, "versions", version)))
    return tuple(dict.fromkeys(links))


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARACTERS else value[:VALUE_CHARACTERS] + "…"


# ------------------------------------------------------------------------------------------- drawing


class RunPage:
    """The open page of one run."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.run = context.params["run"]
        self.artifact = context.query.get("artifact", "")
        self.known: RunRecords | None = None
        self.is_changed = False
        """Whether more than points may have changed since `known` was read."""
        self.may: frozenset[str] = frozenset()
        self.head: Drawing[RunView] = Drawing(context, self._draw_head)

    async def load(self) -> RunView:
        """Ask for the run; also for its experiment and what came of it, unless there are only new points."""
        you, known = self.context.session.identity.principal, self.known
        is_changed, self.is_changed = self.is_changed, False
        if known is None or is_changed:
            found = await self.context.ask(lambda p: _records(p, self.run))
            self.known = replace(found, people={you.id: you.name})
        else:
            details = await self.context.ask(lambda p: p.runs.show(self.run))
            self.known = replace(known, details=details)
        self.view = run_view(self.known, times=self.context.times)
        return self.view

    async def draw(self) -> None:
        context = self.context
        first, self.may = await asyncio.gather(self.load(), context.may(self.run))
        self.run = first.id
        self.head.show(_without_metrics(first))
        ui.label("Curves").classes("panel-title").style("margin-top: 20px").props("role=heading aria-level=2")
        self.curves = CurvePanel(
            context,
            ask=self._ask_curves,
            names={},
            known=first.metric_keys,
            address=lambda query: context.href("runs", self.run, **self._fields(query)),
            query=CurveQuery.of(context.query),
        )
        await self.curves.draw()
        with ui.element("section").classes("panel spaced"):
            self.count = ui.label().classes("panel-title").props("role=heading aria-level=2")
            self.metrics: Drawing[Sequence[MetricLine]] = Drawing(context, _draw_metrics)
        self.body: Drawing[RunView] = Drawing(context, self._draw_body)
        self._show()
        self.preview = ui.element("div")
        if self.artifact:
            await self.show_artifact(self.artifact)
        context.on_notices(self._note, events=EVENTS)
        context.live(self._follow, events=EVENTS, objects=self._followed, gather_s=FOLLOW_S)

    def _note(self, _event: Event | None) -> None:
        self.is_changed = True

    def _show(self) -> None:
        """Draw what is another than before: while a run is running, that is its metrics."""
        bare = _without_metrics(self.view)
        self.head.show(bare)
        self.count.set_text(f"Metrics ({len(self.view.metrics)})")
        self.metrics.show(self.view.metrics)
        self.body.show(bare)

    def _fields(self, query: CurveQuery) -> dict[str, str]:
        return query.fields() | {"artifact": self.artifact}

    def _followed(self) -> tuple[str, ...]:
        """Return the run if it is running: its points make no event."""
        return (self.run,) if self.view.is_running else ()

    async def _follow(self) -> None:
        await self._refresh()
        await self.curves.learn(self.view.metric_keys)
        await self.curves.refresh()

    async def _ask_curves(self, keys: tuple[str, ...], query: CurveQuery) -> Sequence[MetricCurve]:
        low = INT64_MIN if query.from_step is None else query.from_step
        high = INT64_MAX if query.to_step is None else query.to_step
        run = self.run
        return await self.context.ask(lambda p: p.runs.curves(run, keys, from_step=low, to_step=high))

    def _draw_head(self, view: RunView) -> None:
        context = self.context
        with ui.element("div").classes("toolbar"):
            ui.label(view.name).classes("title wrap").style("margin: 0").props("role=heading aria-level=1")
            state_badge("deleted" if view.is_deleted else view.status)
            ui.element("div").classes("grow")
            ui.link("Compare", context.href("compare", runs=view.id)).classes("small")
            if view.is_deleted:
                action_button(
                    context,
                    "Restore",
                    "runs.restore",
                    lambda p: p.runs.restore(view.id),
                    may=self.may,
                    done="The run is restored",
                    icon="restore",
                    after=self._changed,
                )
                return
            if "runs.update" in self.may:
                ui.button("Rename", icon="edit", on_click=self._rename).props(
                    "outline dense data-action=runs.update"
                )
            action_button(
                context,
                "Delete",
                "runs.delete",
                lambda p: p.runs.delete(view.id),
                may=self.may,
                done="The run is deleted; it can be restored",
                confirm="Delete this run? Lists no longer show it, and its points, artifacts and tags stay until it is "
                "removed for good. It can be restored until then.",
                icon="delete",
                after=self._changed,
            )

    async def _changed(self) -> None:
        self.is_changed = True
        await self._refresh()

    async def _refresh(self) -> None:
        try:
            await self.load()
            self._show()
        except Unauthenticated:
            return
        except FalajError as error:
            self.head.show_error(error)

    async def _rename(self) -> None:
        view = self.view
        with self.context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
            ui.label("Rename the run").classes("state-title")
            box = (
                ui.input("Name", value=view.name)
                .props("outlined dense autofocus maxlength=500")
                .classes("full")
            )
            with ui.row():
                ui.button("Rename", on_click=lambda: dialog.submit(box.value)).props("unelevated")
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat")
        name = await dialog
        dialog.delete()
        if name and name != view.name:
            run = self.run
            await self.context.act(lambda p: p.runs.update(run, name=str(name)), done="The run is renamed")
            await self._changed()

    def _draw_body(self, view: RunView) -> None:
        with ui.element("div").classes("columns"):
            with _panel("Facts"):
                with ui.element("dl").classes("facts"):
                    for each in view.facts:
                        fact(each.name, each.value, mono=each.name == "id")
                with ui.element("div").classes("toolbar gap-above"):
                    for link in view.links:
                        ui.link(link.words, self.context.href(*link.target)).classes("wrap")
            with _panel(f"Parameters ({len(view.params)})"):
                if not view.params:
                    empty_state("No parameter was logged.", command='run.log_params({"lr": 0.1})')
                else:
                    _draw_values(view.params, title="Parameters")
            with _panel(f"Tags ({len(view.tags)})"):
                self._draw_tags(view)
            with _panel("Code and environment"):
                self._draw_code(view)
            with _panel(f"Datasets ({len(view.datasets)})"):
                if not view.datasets:
                    empty_state("No dataset was logged.", command="run.log_inputs(datasets=[…])")
                else:
                    columns = [
                        TableColumn(f"d{at}", name)
                        for at, name in enumerate(("Name", "Used for", "Digest", "Kind"))
                    ]
                    rows = [
                        TableRow(str(at), {f"d{place}": value for place, value in enumerate(line)})
                        for at, line in enumerate(view.datasets)
                    ]
                    data_table(columns, rows, title="Datasets")
        with _panel(f"Artifacts ({len(view.artifacts) + view.more_artifacts})").style("margin-top: 16px"):
            self._draw_artifacts(view)

    def _draw_tags(self, view: RunView) -> None:
        if not view.tags:
            empty_state("The run has no tags.", command='run.set_tags({"team": "…"})')
        may_delete = "runs.delete_tags" in self.may and not view.is_deleted
        for each in view.tags:
            with ui.element("div").classes("line"):
                ui.label(each.name).classes("muted wrap").style("flex: none; max-width: 40%")
                ui.label(each.value).classes("grow wrap mono")
                if may_delete:
                    button = ui.button(icon="close", on_click=self._untag(each.name)).props(
                        "flat dense round size=sm"
                    )
                    button.props["aria-label"] = f"Delete the tag {each.name}"
        if "runs.set_tags" in self.may and not view.is_deleted:
            with (
                ui.element("div")
                .classes("toolbar")
                .style("margin-top: 8px")
                .props("data-action=runs.set_tags")
            ):
                key = ui.input("Tag").props("dense outlined maxlength=250").style("width: 130px")
                value = ui.input("Value").props("dense outlined").classes("grow")
                ui.button("Set", on_click=lambda: self._tag(str(key.value), str(value.value))).props(
                    "outline dense"
                )

    async def _tag(self, key: str, value: str) -> None:
        run = self.run
        await self.context.act(lambda p: p.runs.set_tags(run, {key: value}), done="The tag is set")
        await self._changed()

    def _untag(self, key: str) -> Callable[[], Awaitable[None]]:
        async def press() -> None:
            if await ask_first(self.context, f"Delete the tag {key} of this run?", "Delete"):
                run = self.run
                await self.context.act(lambda p: p.runs.delete_tags(run, (key,)), done="The tag is deleted")
                await self._changed()

        return press

    def _draw_code(self, view: RunView) -> None:
        if not view.code and not view.environment:
            empty_state(
                "The run does not say which code it ran; jobs do.",
                command="falaj train train.py",
                icon="code",
            )
        with ui.element("dl").classes("facts"):
            for each in view.code:
                fact(each.name, each.value, mono=True)
        for path in view.environment:
            self._artifact_button(path, path)

    def _draw_artifacts(self, view: RunView) -> None:
        if not view.artifacts:
            empty_state(
                "The run has no artifacts.", command='run.log_artifact("plots/roc.png")', icon="image"
            )
        for each in view.artifacts:
            with ui.element("div").classes("line"):
                self._artifact_button(each.path, each.path)
                ui.element("div").classes("grow")
                ui.label(size(each.size_bytes)).classes("muted small mono")
        if view.more_artifacts:
            ui.label(f"{view.more_artifacts:,} more: falaj runs artifacts {view.id}").classes("muted small")

    def _artifact_button(self, words: str, path: str) -> None:
        button = ui.button(on_click=lambda: self.show_artifact(path)).props("flat dense align=left")
        button.props["data-artifact"] = path
        with button:
            ui.label(words).classes("wrap").style("text-align: left; text-transform: none")

    async def show_artifact(self, path: str) -> None:
        """Show an artifact below the list, and put it into the address."""
        self.artifact = path
        ui.navigate.history.replace(self.context.href("runs", self.run, **self._fields(self.curves.query)))
        found = next((each for each in self.view.artifacts if each.path == path), None)
        run, length = self.run, 0 if found is None else found.size_bytes
        self.preview.clear()
        with self.preview:
            try:
                shown = await self.context.ask(lambda p: _artifact(p, run, path, length))
            except FalajError as error:
                shown = ArtifactView(path, "other", error.message)
            draw_artifact(shown, run)


def _records(platform: Platform, run: str) -> RunRecords:
    details = platform.runs.show(run)
    experiment: Experiment | None = None
    made: tuple[LineageNode, ...] = ()
    try:
        experiment = platform.experiments.show(details.run.experiment)
        made = tuple(platform.lineage.graph(details.run.id, direction=Direction.DOWN, depth=4))
    except (Denied, NotFound):
        pass
    return RunRecords(details, experiment, made)


def _artifact(platform: Platform, run: str, path: str, size_bytes: int) -> ArtifactView:
    """Read as much of an artifact as is shown."""
    if kind_of(path) == "stored table":
        return stored_table_view(path, platform.runs.preview_artifact(run, path))
    wanted = bytes_needed(path)
    data = b"".join(platform.runs.read_artifact(run, path, length=wanted)) if wanted else b""
    return artifact_view(path, data, max(size_bytes, len(data)))


def _without_metrics(view: RunView) -> RunView:
    return replace(view, metrics=())


def _panel(title: str) -> ui.element:
    with ui.element("section").classes("panel") as panel:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return panel


def _draw_values(values: Sequence[NamedValue], *, title: str) -> None:
    columns = [
        TableColumn("name", "Name", sortable=True),
        TableColumn("value", "Value", "mono", sortable=True),
    ]
    rows = [TableRow(each.name, {"name": each.name, "value": each.value}) for each in values]
    data_table(columns, rows, title=title)


def _draw_metrics(metrics: Sequence[MetricLine]) -> None:
    if not metrics:
        empty_state("No metric was logged yet.", command='run.log_metrics({"loss": 0.1}, step=1)')
        return
    columns = [
        TableColumn("key", "Metric", sortable=True),
        TableColumn("last", "Last", "number"),
        TableColumn("low", "Lowest", "number"),
        TableColumn("high", "Highest", "number"),
        TableColumn("step", "Step", "number"),
        TableColumn("points", "Points", "number"),
    ]
    rows = [
        TableRow(
            each.key,
            {"key": each.key, "last": each.last, "low": each.low, "high": each.high}
            | {"step": each.step, "points": each.points},
        )
        for each in metrics
    ]
    data_table(columns, rows, title="Metrics")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await RunPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/runs/{run}",
    "Run",
    draw,
    entry="runs",
    reads=(
        "runs.show",
        "runs.curves",
        "runs.read_artifact",
        "runs.preview_artifact",
        "experiments.show",
        "lineage.graph",
    ),
    actions=ACTIONS,
)
