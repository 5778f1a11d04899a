"""Variants of a version that optimization made: the Pareto plot, the table, and the recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.graphs import ParetoPoint, pareto
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.sections import Cell, panel, small_table
from falaj.apps.console.page import PageContext
from falaj.apps.console.pages.models.catalogue import number_of
from falaj.apps.console.times import Times, duration, number, size
from falaj.records.optimization import HIGHER_IS_BETTER, Optimization, OptimizationVerdict, ParetoRow

LOSSES = {"log_loss": "log loss", "rmse": "RMSE", "auc": "AUC", "accuracy": "accuracy"}


@dataclass(frozen=True)
class VariantRow:
    name: str
    device: str
    verdict: str
    latency: str
    rows_per_s: str
    size: str
    quality: str
    cost: str
    on_front: bool
    version: str


@dataclass(frozen=True)
class MeasuredVariants:
    """One optimization."""

    title: str
    host: str
    metric: str
    higher_is_better: bool
    points: tuple[ParetoPoint, ...]
    """Latency in microseconds and quality, of what has both."""
    rows: tuple[VariantRow, ...]
    reasons: tuple[tuple[str, str, str], ...]
    recommendation: str


@dataclass(frozen=True)
class VariantsView:
    optimizations: tuple[MeasuredVariants, ...]


def variants(found: Sequence[Optimization], reference: str, *, times: Times) -> VariantsView | None:
    """Return the optimizations of a version, newest first; none if there is none."""
    if not found:
        return None
    ordered = sorted(found, key=lambda each: each.created_at, reverse=True)
    return VariantsView(tuple(_measured(each, reference, times) for each in ordered))


def _measured(found: Optimization, reference: str, times: Times) -> MeasuredVariants:
    metric = found.report.metric
    origin = "Variants" if found.model == reference else f"Variants of {found.model}"
    return MeasuredVariants(
        title=f"{origin}, measured {times.moment(found.created_at)}",
        host=" · ".join(part for part in (found.report.host, found.report.gpu) if part),
        metric=LOSSES.get(metric, metric),
        higher_is_better=metric in HIGHER_IS_BETTER,
        points=tuple(
            ParetoPoint(
                each.name,
                each.latency_p50_us,
                float(f"{each.quality:.4g}"),  # as the table shows it
                is_refused=each.verdict is OptimizationVerdict.REFUSED,
            )
            for each in found.table
            if each.quality is not None
        ),
        rows=tuple(_row(each, found.currency) for each in found.table),
        reasons=tuple((each.recipe, each.verdict.value, each.reason) for each in found.report.variants),
        recommendation="" if found.recommendation is None else f"Recommended: {found.recommendation.words}",
    )


def _row(row: ParetoRow, currency: str | None) -> VariantRow:
    cost = "–" if row.cost_per_million is None else f"{number(row.cost_per_million)} {currency or ''}".strip()
    return VariantRow(
        name=row.name,
        device=row.device,
        verdict="–" if row.verdict is None else row.verdict.value,
        latency=duration(row.latency_p50_us / 1e6)
        if row.latency_p50_us >= 1000
        else f"{number(row.latency_p50_us)} µs",
        rows_per_s=number(round(row.rows_per_s)),
        size=size(row.size_bytes),
        quality=number(row.quality),
        cost=cost,
        on_front=row.on_front,
        version=row.version or "",
    )


# ------------------------------------------------------------------------------------------- drawing


def draw_variants(context: PageContext, view: VariantsView, model: str) -> None:
    for each in view.optimizations:
        with panel(each.title, note=each.host):
            if each.recommendation:
                ui.label(each.recommendation).classes("strong wrap")
            if each.points:
                options = pareto(
                    each.points,
                    palette(context.is_dark),
                    title=f"Latency and {each.metric} of the variants of {model}",
                    x_name="median latency of one row",
                    x_unit="µs",
                    y_name=f"{each.metric}, {'higher' if each.higher_is_better else 'lower'} is better",
                    y_better=1 if each.higher_is_better else -1,
                )
                chart(options, height_px=360)
            heads = (
                "variant",
                "on",
                "verdict",
                "latency",
                "rows/s",
                "size",
                each.metric,
                "per million",
                "Pareto",
                "version",
            )
            rows = [_cells(context, row, model) for row in each.rows]
            small_table(heads, rows, title="Variants")
        if each.reasons:
            with panel("Why they were accepted or refused"):
                small_table(("recipe", "verdict", "reason"), each.reasons, title="Verdicts")


def _cells(context: PageContext, row: VariantRow, model: str) -> Sequence[Cell | str]:
    tones = {OptimizationVerdict.ACCEPTED.value: "good", OptimizationVerdict.REFUSED.value: "bad"}
    page = context.href("models", model, "versions", number_of(row.version)) if "@" in row.version else ""
    figures = (row.latency, row.rows_per_s, row.size, row.quality, row.cost)
    return (
        row.name,
        row.device,
        Cell(row.verdict, tone=tones.get(row.verdict, "")),
        *(Cell(each, tone="figure") for each in figures),
        "on the front" if row.on_front else "–",
        Cell(row.version or "–", page),
    )
