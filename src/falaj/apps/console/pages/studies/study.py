"""One study: its progress, the best trial, parallel coordinates, the importance of parameters, and all trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import empty_state, fact, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.runs.comparison import Axis, axis_of, draw_parallel
from falaj.apps.console.times import Times, number
from falaj.records.tuning import Choice, Objective, Study, StudyTrial, TrialState, spell
from falaj.sdk.platform import Platform

FOLLOW_S = 2.0
MOST_TRIALS = 2000
"""The newest trials that are shown."""
MOST_AXES = 14


@dataclass(frozen=True)
class TrialLine:
    """A trial in the table."""

    number: int
    state: str
    values: tuple[str, ...]
    params: tuple[str, ...]
    run: str
    reason: str


@dataclass(frozen=True)
class StudyView:
    """What the page shows."""

    id: str
    name: str
    state: str
    is_running: bool
    finished: int
    planned: int
    facts: tuple[tuple[str, str], ...]
    reason: str
    metrics: tuple[str, ...]
    param_names: tuple[str, ...]
    best: tuple[TrialLine, ...]
    trials: tuple[TrialLine, ...]
    values: tuple[tuple[int, float], ...]
    """Number and first value of each complete trial, by number."""
    best_so_far: tuple[tuple[int, float], ...]
    axes: tuple[Axis, ...]
    importance: tuple[tuple[str, float], ...]


def study_view(study: Study, trials: Sequence[StudyTrial], *, times: Times) -> StudyView:
    """Return what the page shows of a study and its trials."""
    objectives, names = study.settings.objectives, tuple(study.settings.space)
    complete = sorted(
        (each for each in trials if each.state is TrialState.COMPLETE and each.values),
        key=lambda each: each.number,
    )
    counts = {str(state): count for state, count in study.counts.items() if count}
    return StudyView(
        id=study.id,
        name=study.name,
        state=str(study.state),
        is_running=not study.state.ended,
        finished=study.finished,
        planned=study.settings.planned,
        facts=(
            ("metric", ", ".join(f"{each.metric} ({each.direction})" for each in objectives)),
            ("sampler", study.settings.sampler),
            ("pruner", study.settings.pruning.method),
            ("trials at a time", str(study.settings.parallel)),
            ("trials", ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"),
            ("started", times.moment(study.created_at)),
            ("ended", times.moment(study.ended_at)),
            *([("registered", study.version)] if study.version else []),
        ),
        reason=study.reason or study.stopping or "",
        metrics=tuple(each.metric for each in objectives),
        param_names=names,
        best=tuple(_line(each, names) for each in study.best),
        trials=tuple(_line(each, names) for each in sorted(trials, key=lambda each: -each.number)),
        values=tuple((each.number, each.values[0]) for each in complete),
        best_so_far=_best_so_far(complete, objectives[0]),
        axes=_axes(complete, names, objectives),
        importance=tuple(
            (each.param, each.importance)
            for each in sorted(study.importance, key=lambda each: -each.importance)
        ),
    )


def _line(trial: StudyTrial, names: Sequence[str]) -> TrialLine:
    return TrialLine(
        number=trial.number,
        state=str(trial.state),
        values=tuple(number(value) for value in trial.values),
        params=tuple(_value(trial.params[name]) if name in trial.params else "–" for name in names),
        run=trial.run or "",
        reason=trial.reason or "",
    )


def _value(value: Choice) -> str:
    return number(value) if isinstance(value, float) else spell(value)


def _best_so_far(complete: Sequence[StudyTrial], objective: Objective) -> tuple[tuple[int, float], ...]:
    better = min if objective.direction == "minimize" else max
    found: list[tuple[int, float]] = []
    for each in complete:
        best = each.values[0] if not found else better(found[-1][1], each.values[0])
        found.append((each.number, best))
    return tuple(found)


def _axes(
    complete: Sequence[StudyTrial], names: Sequence[str], objectives: Sequence[Objective]
) -> tuple[Axis, ...]:
    """Return the parameters and then the metrics, each with the values of all complete trials."""
    if len(complete) < 2:
        return ()
    given = [
        axis_of(name, [spell(each.params[name]) if name in each.params else None for each in complete])
        for name in names[: MOST_AXES - len(objectives)]
    ]
    reached = [
        axis_of(objective.metric, [each.values[at] for each in complete])
        for at, objective in enumerate(objectives)
    ]
    return (*given, *reached)


# ------------------------------------------------------------------------------------------- drawing


def _load(platform: Platform, study: str) -> tuple[Study, list[StudyTrial]]:
    """Return a study and its newest trials."""
    found, trials, after = platform.studies.show(study), list[StudyTrial](), ""
    while len(trials) < MOST_TRIALS:
        page = platform.studies.trials(study, after=after, limit=1000)
        trials += page.items
        if page.next is None:
            break
        after = page.next
    return found, trials


def draw_study(context: PageContext, view: StudyView) -> None:
    """Draw a study."""
    share = view.finished / view.planned if view.planned else 0.0
    with ui.element("section").classes("panel"):
        ui.label(f"{view.finished} of {view.planned} trials").classes("strong")
        bar = ui.element("div").classes("gauge").style("margin: 6px 0 12px")
        bar.props("role=progressbar aria-valuemin=0 aria-valuemax=100 aria-label='trials that ended'")
        bar.props["aria-valuenow"] = round(100 * share)
        with bar:
            ui.element("div").classes("gauge-fill").style(f"width: {100 * share:.0f}%")
        if view.reason:
            ui.label(view.reason).classes("wrap")
        with ui.element("dl").classes("facts"):
            for name, value in view.facts:
                fact(name, value)
    with ui.element("div").classes("columns"):
        _draw_best(context, view)
        _draw_progress(context, view)
        _draw_importance(context, view)
    if view.axes:
        with _panel("Parallel coordinates"):
            what = f"{len(view.values)} complete trials"
            draw_parallel(context, view.axes, len(view.axes) - len(view.metrics), what=what)
    with _panel(f"Trials ({len(view.trials)})"):
        if not view.trials:
            empty_state("No trial was started yet.", icon="hourglass_empty")
        else:
            _draw_trials(context, view, view.trials, title="Trials")


def _draw_best(context: PageContext, view: StudyView) -> None:
    words = "Best trial" if len(view.metrics) == 1 else f"Pareto front ({len(view.best)})"
    with _panel(words):
        if not view.best:
            empty_state("No trial is complete yet.", icon="hourglass_empty")
        elif len(view.best) > 1:
            _draw_trials(context, view, view.best, title=words)
        else:
            best = view.best[0]
            with ui.element("dl").classes("facts"):
                fact("trial", str(best.number))
                for name, value in zip(view.metrics, best.values, strict=False):
                    fact(name, value, mono=True)
                for name, value in zip(view.param_names, best.params, strict=True):
                    fact(name, value, mono=True)
            if best.run:
                ui.link("Run of this trial", context.href("runs", best.run))


def _draw_progress(context: PageContext, view: StudyView) -> None:
    with _panel("Progress"):
        if not view.values:
            empty_state("No trial is complete yet.", icon="hourglass_empty")
            return
        curves = [
            Curve(name, tuple(float(at) for at, _ in points), tuple(value for _, value in points))
            for name, points in (("trial", view.values), ("best so far", view.best_so_far))
        ]
        title = f"{view.metrics[0]} of each complete trial, and the best so far"
        options = line_chart(
            curves, palette(context.is_dark), title=title, x_name="trial", y_name=view.metrics[0]
        )
        options["series"][0] |= {"type": "scatter"}
        chart(options, height_px=280)


def _draw_importance(context: PageContext, view: StudyView) -> None:
    with _panel("Importance of parameters"):
        if not view.importance:
            empty_state("It is known once several trials are complete.", icon="hourglass_empty")
            return
        bars = [Bar(name, (round(100 * share, 1),)) for name, share in view.importance]
        options = bar_chart(
            bars,
            ("share of the differences",),
            palette(context.is_dark),
            title="Share of each parameter in the differences between trials",
            unit="%",
        )
        options["xAxis"]["name"] = "share [%]"
        chart(options, height_px=90 + 34 * len(bars))


def _draw_trials(context: PageContext, view: StudyView, trials: Sequence[TrialLine], *, title: str) -> None:
    columns = [
        TableColumn("number", "Trial", "link", sortable=True),
        TableColumn("state", "State", "state", sortable=True),
        *(TableColumn(f"v{at}", name, "number", sortable=True) for at, name in enumerate(view.metrics)),
        *(TableColumn(f"p{at}", name, "mono", sortable=True) for at, name in enumerate(view.param_names)),
        TableColumn("reason", "Reason"),
    ]
    rows = [
        TableRow(
            str(each.number),
            {
                "number": each.number,
                "state": each.state,
                "reason": each.reason,
                **{f"v{at}": value for at, value in enumerate(each.values)},
                **{f"p{at}": value for at, value in enumerate(each.params)},
            },
            context.href("runs", each.run) if each.run else "#",
        )
        for each in trials
    ]
    data_table(columns, rows, title=title)


def _panel(title: str) -> ui.element:
    with ui.element("section").classes("panel").style("margin-top: 16px") as panel:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return panel


async def draw(context: PageContext) -> None:
    """Draw the page; whenever trials change, the controller records that, which is an event."""
    study = context.params["study"]

    async def load() -> StudyView:
        found, trials = await context.ask(lambda p: _load(p, study))
        return study_view(found, trials, times=context.times)

    async def refresh() -> None:
        await region.refresh()

    may = await context.may((await load()).id)

    def draw_view(view: StudyView) -> None:
        with ui.element("div").classes("toolbar"):
            ui.label(view.name).classes("title wrap").style("margin: 0").props("role=heading aria-level=1")
            state_badge(view.state)
            ui.element("div").classes("grow")
            if view.is_running:
                action_button(
                    context,
                    "Stop",
                    "studies.stop",
                    lambda p: p.studies.stop(view.id),
                    may=may,
                    done="The study stops",
                    confirm="Stop this study? No further trial starts, and those that wait or run are cancelled. "
                    "It can be resumed.",
                    icon="stop",
                    after=refresh,
                )
            else:
                action_button(
                    context,
                    "Resume",
                    "studies.resume",
                    lambda p: p.studies.resume(view.id),
                    may=may,
                    done="The study goes on",
                    confirm="Resume this study? It goes on, on your behalf, up to the trials that were planned.",
                    icon="play_arrow",
                    after=refresh,
                )
        draw_study(context, view)

    region = await context.region(load, draw_view, events=("studies.*",), gather_s=FOLLOW_S)


PAGE = ConsolePage(
    "/w/{workspace}/studies/{study}",
    "Tuning study",
    draw,
    entry="runs",
    reads=("studies.show", "studies.trials"),
    actions=("studies.stop", "studies.resume"),
)
