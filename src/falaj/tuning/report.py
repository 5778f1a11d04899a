"""The report of a study: its data as JSON, and parallel coordinates and importance as one HTML file.

The file holds its drawings as SVG, without scripts and without anything from elsewhere, so that it can be opened
anywhere. Every text is escaped: names and choices come from users.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from falaj.records.tuning import (
    Choice,
    ChoiceParam,
    FloatParam,
    IntParam,
    ParamImportance,
    ReportedTrial,
    Study,
    StudyReport,
    StudyTrial,
    TrialState,
    importance_of,
    spell,
)

WIDTH, HEIGHT, MARGIN = 1000, 380, 60
MOST_LINES = 2000
"""Trials that are drawn, the newest; the data has all."""
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:left;border-bottom:1px solid #ddd}"
    "svg{max-width:100%;height:auto}text{font-size:12px;fill:#222}.axis{stroke:#888}"
    "polyline{fill:none;stroke-width:1.4;stroke-opacity:.55}.best{stroke-width:3.5;stroke-opacity:1}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}text{fill:#ddd}}"
)


def report_data(study: Study, trials: Sequence[StudyTrial]) -> StudyReport:
    """Return the data of the report."""
    return StudyReport(
        study=study.name,
        objectives=study.settings.objectives,
        space=study.settings.space,
        trials=tuple(
            ReportedTrial(
                number=each.number, state=each.state, params=each.params, values=each.values, run=each.run
            )
            for each in trials
        ),
        best=tuple(each.number for each in study.best),
        importance=study.importance,
    )


def render_report(data: StudyReport) -> str:
    """Return the report as HTML."""
    goals = ", ".join(f"{each.direction} {each.metric}" for each in data.objectives)
    counts = {state: sum(each.state is state for each in data.trials) for state in TrialState}
    told = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    body = [
        f"<h1>Study {escape(data.study)}</h1><p>{escape(goals)}; {escape(told) or 'no trials'}.</p>",
        "<h2>Parallel coordinates</h2>",
        parallel_coordinates(data),
        "<h2>Importance of the parameters</h2>",
        importance_bars(data),
        "<h2>Best trials</h2>",
        _best_table(data),
    ]
    head = f'<meta charset="utf-8"><title>Study {escape(data.study)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>"


def parallel_coordinates(data: StudyReport) -> str:
    """Return one line for each complete trial across an axis for each parameter and metric, as SVG."""
    shown = [each for each in data.trials if each.state is TrialState.COMPLETE][-MOST_LINES:]
    if not shown:
        return "<p>No trial was completed.</p>"
    axes = [*data.space, *(each.metric for each in data.objectives)]
    gap = (WIDTH - 2 * MARGIN) / max(len(axes) - 1, 1)
    heights = [_param_heights(data, name, shown) for name in data.space]
    heights += [_metric_heights(number, shown) for number in range(len(data.objectives))]
    parts = [_axis(MARGIN + at * gap, name, data, shown) for at, name in enumerate(axes)]
    ranks = _ranks(data, shown)
    order = sorted(range(len(shown)), key=lambda row: shown[row].number in data.best)
    for row in order:
        spots = " ".join(
            f"{MARGIN + at * gap:.1f},{_y(column[row]):.1f}" for at, column in enumerate(heights)
        )
        is_best = shown[row].number in data.best
        color = "#d62728" if is_best else f"hsl({210 + 60 * ranks[row]:.0f} 60% {35 + 40 * ranks[row]:.0f}%)"
        kind = " class=best" if is_best else ""
        title = f"<title>trial {shown[row].number}: {escape(_told(shown[row], data))}</title>"
        parts.append(f'<polyline{kind} stroke="{color}" points="{spots}">{title}</polyline>')
    return _svg(HEIGHT, parts, "Parallel coordinates of the trials")


def importance_bars(data: StudyReport) -> str:
    """Return the importance of each parameter as SVG bars, for each metric."""
    if not data.importance:
        return "<p>Too few trials were completed to tell.</p>"
    several = len(data.objectives) > 1
    parts = []
    for each in data.objectives:
        shares = importance_of(data.importance, each.metric)
        title = f"<h3>{escape(each.metric)}</h3>" if several else ""
        parts.append(title + (_bars(shares) if shares else "<p>It did not differ between trials.</p>"))
    return "".join(parts)


def _bars(shares: Sequence[ParamImportance]) -> str:
    parts = []
    for at, each in enumerate(shares):
        top, width = 10 + 26 * at, max(each.importance, 0.0) * (WIDTH - 360)
        parts.append(f'<text x="190" y="{top + 14}" text-anchor="end">{escape(_short(each.param))}</text>')
        parts.append(f'<rect x="200" y="{top}" width="{width:.1f}" height="18" fill="#4878a8"/>')
        parts.append(f'<text x="{206 + width:.1f}" y="{top + 14}">{each.importance:.1%}</text>')
    return _svg(20 + 26 * len(shares), parts, "Importance of the parameters by PED-ANOVA")


def _best_table(data: StudyReport) -> str:
    best = [each for each in data.trials if each.number in data.best]
    if not best:
        return "<p>None.</p>"
    names = ["trial", *(each.metric for each in data.objectives), *data.space]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = (
        [
            str(each.number),
            *(f"{value:.6g}" for value in each.values),
            *(_value(each, name) for name in data.space),
        ]
        for each in best
    )
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _param_heights(data: StudyReport, name: str, shown: Sequence[ReportedTrial]) -> list[float]:
    given = data.space[name]
    return [position(given, each.params[name]) for each in shown]


def position(given: FloatParam | IntParam | ChoiceParam, value: Choice) -> float:
    """Return where a value lies in its range, from 0 to 1."""
    if isinstance(given, ChoiceParam):
        known = [spell(each) for each in given.choices]
        return known.index(spell(value)) / max(len(known) - 1, 1)
    low, high, at = float(given.low), float(given.high), float(value)
    if given.log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return 0.5 if high <= low else (at - low) / (high - low)


def _metric_heights(number: int, shown: Sequence[ReportedTrial]) -> list[float]:
    values = [each.values[number] for each in shown]
    low, high = min(values), max(values)
    return [0.5 if high <= low else (value - low) / (high - low) for value in values]


def _ranks(data: StudyReport, shown: Sequence[ReportedTrial]) -> list[float]:
    """Return the rank of each trial by the first metric, from 0 for the best to 1."""
    sign = 1 if data.objectives[0].direction == "minimize" else -1
    order = sorted(range(len(shown)), key=lambda row: sign * shown[row].values[0])
    ranks = [0.0] * len(shown)
    for rank, row in enumerate(order):
        ranks[row] = rank / max(len(shown) - 1, 1)
    return ranks


def _axis(x: float, name: str, data: StudyReport, shown: Sequence[ReportedTrial]) -> str:
    given = data.space.get(name)
    if isinstance(given, ChoiceParam):
        count = max(len(given.choices) - 1, 1)
        marks = [(at / count, spell(each)) for at, each in enumerate(given.choices)][:30]
    elif given is not None:
        marks = [(0.0, f"{given.low:g}"), (1.0, f"{given.high:g}")]
    else:
        number = [each.metric for each in data.objectives].index(name)
        values = [each.values[number] for each in shown]
        marks = [(0.0, f"{min(values):.5g}"), (1.0, f"{max(values):.5g}")]
    line = f'<line class=axis x1="{x:.1f}" x2="{x:.1f}" y1="{_y(0)}" y2="{_y(1)}"/>'
    title = f'<text x="{x:.1f}" y="18" text-anchor="middle">{escape(_short(name))}</text>'
    ticks = (
        f'<text x="{x + 4:.1f}" y="{_y(at) + (14 if at == 0 else -4):.1f}">{escape(_short(words))}</text>'
        for at, words in marks
    )
    return line + title + "".join(ticks)


def _y(height: float) -> float:
    return round(HEIGHT - 30 - height * (HEIGHT - 80), 1)


def _svg(height: int, parts: Sequence[str], label: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" {box}>{"".join(parts)}</svg>'


def _told(trial: ReportedTrial, data: StudyReport) -> str:
    values = (f"{each.metric} {value:.6g}" for each, value in zip(data.objectives, trial.values, strict=True))
    return ", ".join([*values, *(f"{name} {_value(trial, name)}" for name in data.space)])


def _value(trial: ReportedTrial, name: str) -> str:
    value = trial.params[name]
    return f"{value:.6g}" if isinstance(value, float) else spell(value)


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"
