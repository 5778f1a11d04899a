"""The table of runs: filtered, sorted and paged by the API, with the metrics and parameters that the person chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nicegui import ui

from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import Cell, Sorting, TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times, duration, number
from falaj.records.tracking import Experiment, ListedRun
from falaj.sdk.platform import Platform

PAGE_ROWS = 50
DEFAULT_METRICS = 4
"""So many metrics are shown until the person chooses some."""
NEWEST_FIRST = Sorting("started", descending=True)
ORDERS = {"name": "attributes.run_name", "status": "attributes.status", "started": "attributes.start_time"}


@dataclass(frozen=True)
class RunQuery:
    """What the address asks for."""

    where: str = ""
    experiment: str = ""
    metrics: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    sorting: Sorting = NEWEST_FIRST
    after: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RunQuery:
        """Return the query in the part of an address behind the question mark."""
        return cls(
            where=query.get("filter", ""),
            experiment=query.get("experiment", ""),
            metrics=_names(query.get("metrics", "")),
            params=_names(query.get("params", "")),
            sorting=Sorting(query.get("sort", "started"), query.get("order", "desc") == "desc"),
            after=query.get("after", ""),
        )

    def fields(self) -> dict[str, str]:
        """Return the same as parts of an address."""
        return {
            "filter": self.where,
            "experiment": self.experiment,
            "metrics": ",".join(self.metrics),
            "params": ",".join(self.params),
            "sort": self.sorting.key,
            "order": "desc" if self.sorting.descending else "asc",
            "after": self.after,
        }

    @property
    def order_by(self) -> str:
        """Return what the API sorts by."""
        group, _, rest = self.sorting.key.partition(".")
        subject = ORDERS.get(self.sorting.key)
        if subject is None and group in ("metrics", "params") and rest:
            subject = f'{group}."{rest}"' if '"' not in rest else f"{group}.`{rest}`"
        return f"{subject or ORDERS['started']} {'DESC' if self.sorting.descending else 'ASC'}"


@dataclass(frozen=True)
class RunsView:
    """The rows of one page, and what can be chosen."""

    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    sort_keys: Mapping[str, str]
    """What each sortable column sorts by: names that people chose are no keys of columns."""
    sorting: Sorting | None
    experiments: tuple[tuple[str, str], ...]
    known_metrics: tuple[str, ...]
    shown_metrics: tuple[str, ...]
    known_params: tuple[str, ...]
    following: str | None
    is_first: bool
    is_filtered: bool


def runs_view(
    runs: Sequence[ListedRun],
    experiments: Sequence[Experiment],
    query: RunQuery,
    *,
    following: str | None,
    times: Times,
    base: str,
) -> RunsView:
    """Return what the table shows; `base` is the address of the page of a run, without its id."""
    known_metrics = tuple(dict.fromkeys(each.key for run in runs for each in run.metrics))
    known_params = tuple(dict.fromkeys(each.key for run in runs for each in run.params))
    metrics = query.metrics or tuple(key for key in known_metrics if "/" not in key)[:DEFAULT_METRICS]
    names = {str(each.id): each.name for each in experiments}
    sort_keys = {"name": "name", "status": "status", "started": "started"}
    sort_keys |= {f"m{at}": f"metrics.{key}" for at, key in enumerate(metrics)}
    sort_keys |= {f"p{at}": f"params.{key}" for at, key in enumerate(query.params)}
    columns = (
        TableColumn("name", "Run", "link", sortable=True),
        TableColumn("status", "Status", "state", sortable=True),
        TableColumn("experiment", "Experiment"),
        *(TableColumn(f"m{at}", key, "number", sortable=True) for at, key in enumerate(metrics)),
        *(TableColumn(f"p{at}", key, sortable=True) for at, key in enumerate(query.params)),
        TableColumn("started", "Started", "time", sortable=True),
        TableColumn("took", "Duration", "number"),
    )
    column_of = {key: column for column, key in sort_keys.items()}
    here = column_of.get(query.sorting.key)
    return RunsView(
        columns=columns,
        rows=tuple(_row(run, metrics, query.params, names, times, base) for run in runs),
        sort_keys=sort_keys,
        sorting=None if here is None else Sorting(here, query.sorting.descending),
        experiments=tuple((each.id, each.name) for each in experiments),
        known_metrics=tuple(dict.fromkeys((*metrics, *known_metrics))),
        shown_metrics=metrics,
        known_params=tuple(dict.fromkeys((*query.params, *known_params))),
        following=following,
        is_first=not query.after,
        is_filtered=bool(query.where or query.experiment),
    )


def _row(
    run: ListedRun,
    metrics: Sequence[str],
    params: Sequence[str],
    experiments: Mapping[str, str],
    times: Times,
    base: str,
) -> TableRow:
    last = {each.key: each.last for each in run.metrics}
    given = {each.key: each.value for each in run.params}
    cells: dict[str, Cell] = {
        "name": run.name,
        "status": str(run.status),
        "experiment": experiments.get(run.experiment, ""),
        "started": times.moment(run.started_at),
        "took": duration(None if run.ended_at is None else run.ended_at - run.started_at),
    }
    cells |= {f"m{at}": number(last.get(key)) for at, key in enumerate(metrics)}
    cells |= {f"p{at}": given.get(key, "–") for at, key in enumerate(params)}
    return TableRow(run.id, cells, f"{base}/{run.id}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part for part in text.split(",") if part))


# ------------------------------------------------------------------------------------------- drawing


class RunsTable:
    """The table on an open page, and the controls that change its address and its rows."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.query = RunQuery.of(context.query)

    async def load(self) -> RunsView:
        """Ask the API for one page of runs."""
        query, here = self.query, self.context.workspace

        def ask(p: Platform) -> RunsView:
            page = p.runs.list(
                experiments=(query.experiment,) if query.experiment else (),
                where=query.where,
                order_by=(query.order_by,),
                show=("params", "metrics"),
                workspace=here,
                after=query.after,
                limit=PAGE_ROWS,
            )
            experiments = p.experiments.list(workspace=here, limit=1000).items
            return runs_view(
                page.items,
                experiments,
                query,
                following=page.next,
                times=self.context.times,
                base=self.context.href("runs"),
            )

        return await self.context.ask(ask)

    async def change(self, **changes: object) -> None:
        """Show other rows, and put them into the address; the back button leads back."""
        self.query = replace(self.query, **{"after": "", **changes})  # type: ignore[arg-type]
        ui.navigate.history.push(self.context.href("runs", **self.query.fields()))
        await self.region.refresh()

    async def draw(self) -> None:
        ui.label("Runs").classes("title").props("role=heading aria-level=1")
        with ui.element("div").classes("toolbar"):
            field = ui.input(
                "Filter", value=self.query.where, placeholder="metrics.auc > 0.9 and params.lr = '0.1'"
            )
            field.props("dense outlined clearable").classes("grow filter")
            field.on("keydown.enter", lambda: self.change(where=str(field.value or "").strip()))
            field.on("clear", lambda: self.change(where=""))
            ui.link("Tuning studies", self.context.href("studies"))
        self.region = await self.context.region(self.load, self.show, events=("runs.*", "experiments.*"))

    def show(self, view: RunsView) -> None:
        if not view.rows and not view.is_filtered and view.is_first:
            empty_state(
                "No run was logged in this workspace yet.", command="falaj train train.py", icon="show_chart"
            )
            return
        with ui.element("div").classes("toolbar"):
            chosen = ui.select(
                {"": "All experiments", **dict(view.experiments)},
                value=self.query.experiment,
                label="Experiment",
                on_change=lambda event: self.change(experiment=event.value or ""),
            )
            chosen.props("dense outlined").classes("chooser")
            self._chooser("Metrics", view.known_metrics, view.shown_metrics, "metrics")
            self._chooser("Parameters", view.known_params, self.query.params, "params")

        async def sort(wanted: Sorting) -> None:
            await self.change(sorting=Sorting(view.sort_keys[wanted.key], wanted.descending))

        if not view.rows:
            empty_state("No run matches the filter.", icon="filter_alt_off")
        else:
            data_table(view.columns, view.rows, title="Runs", sorting=view.sorting, on_sort=sort)
        with ui.element("div").classes("toolbar pager"):
            if not view.is_first:
                ui.button("First page", on_click=lambda: self.change()).props("flat dense")
            if view.following is not None:
                following = view.following
                ui.button("Next page", on_click=lambda: self.change(after=following)).props("flat dense")

    def _chooser(self, label: str, known: Sequence[str], shown: Sequence[str], name: str) -> None:
        if known:
            chooser = ui.select(
                [*known],
                value=[*shown],
                multiple=True,
                label=label,
                on_change=lambda event: self.change(**{name: tuple(event.value)}),
            )
            chooser.props("dense outlined options-dense").classes("chooser")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await RunsTable(context).draw()


PAGE = ConsolePage("/w/{workspace}/runs", "Runs", draw, entry="runs", reads=("runs.list", "experiments.list"))
