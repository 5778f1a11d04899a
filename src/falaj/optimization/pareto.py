"""The Pareto table of an optimization, the cost of predictions, and what to serve on which device. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.optimization.progress import ORIGINAL
from falaj.records.config import Prices
from falaj.records.optimization import (
    HIGHER_IS_BETTER,
    Device,
    Measurement,
    OptimizationReport,
    OptimizationVerdict,
    ParetoRow,
    QualityMetric,
    Recommendation,
)

MILLION = 1e6
HOUR_S = 3600.0


def pareto_table(report: OptimizationReport, *, model: str, prices: Prices | None) -> tuple[ParetoRow, ...]:
    """Return the original and the variants that were measured; the front is among those that may be served."""
    rows = [_row(ORIGINAL, report.original, report, prices, version=model)]
    if report.on_gpu is not None:
        rows.append(_row(ORIGINAL, report.on_gpu, report, prices, version=model, device="gpu"))
    for each in report.variants:
        if each.measured is not None:
            made = _row(each.recipe, each.measured, report, prices, version=each.version, device=each.device)
            rows.append(made.model_copy(update={"verdict": each.verdict}))
    served = [row for row in rows if row.verdict is not OptimizationVerdict.REFUSED]
    return tuple(
        row.model_copy(update={"on_front": row in served and not _is_dominated(row, served, report.metric)})
        for row in rows
    )


def recommend(
    table: Sequence[ParetoRow], report: OptimizationReport, *, prices: Prices | None
) -> Recommendation:
    """Return the fastest of what may be served on the cheaper device, or without prices on the CPU; and why."""
    served = [row for row in table if row.verdict is not OptimizationVerdict.REFUSED]
    on_cpu = _best([row for row in served if row.device == "cpu"])
    on_gpu = _best([row for row in served if row.device == "gpu"])
    if on_gpu is None or on_cpu is None:
        best = on_cpu or on_gpu or table[0]
        why = (
            f"no measurement on a GPU: {report.gpu}"
            if report.gpu
            else "no GPU was measured; --gpus 1 asks for one"
        )
        return _recommendation(best, f"{_figures(best, prices)}; {why}")
    times = on_gpu.rows_per_s / on_cpu.rows_per_s
    both = f"CPU: {on_cpu.name}, {_figures(on_cpu, prices)}; GPU: {on_gpu.name}, {_figures(on_gpu, prices)}"
    if on_cpu.cost_per_million is None or on_gpu.cost_per_million is None:
        words = f"{both}; the GPU is cheaper if its hour costs less than {times:,.1f} CPU-hours (falaj.toml: [prices])"
        return _recommendation(on_cpu, words)
    best, other = (on_cpu, on_gpu) if on_cpu.cost_per_million <= on_gpu.cost_per_million else (on_gpu, on_cpu)
    ratio = (other.cost_per_million or 0.0) / max(best.cost_per_million or 0.0, 1e-12)
    words = f"{both}; the {best.device.upper()} costs 1/{ratio:,.1f} for each prediction at full load"
    return _recommendation(best, words)


def cost_per_million(
    rows_per_s: float, device: Device, prices: Prices | None, *, gpu: str = ""
) -> float | None:
    """Return what a million predictions cost at full load: one CPU, and for the GPU one GPU beside it."""
    if prices is None or rows_per_s <= 0:
        return None
    hour = prices.cpu_hour
    if device == "gpu":
        hour += prices.gpu_models.get(gpu, prices.gpu_hour)
    return hour / HOUR_S * MILLION / rows_per_s


def quality_of(measured: Measurement, metric: QualityMetric) -> float | None:
    """Return the value of the budget's metric."""
    return {"auc": measured.auc, "accuracy": measured.accuracy}.get(metric, measured.loss)


def _row(
    name: str,
    measured: Measurement,
    report: OptimizationReport,
    prices: Prices | None,
    *,
    version: str | None,
    device: Device = "cpu",
) -> ParetoRow:
    return ParetoRow(
        name=name,
        device=device,
        latency_p50_us=measured.latency_p50_us,
        rows_per_s=measured.rows_per_s,
        best_batch=measured.best_batch,
        size_bytes=measured.size_bytes,
        memory_bytes=measured.memory_bytes,
        quality=quality_of(measured, report.metric),
        cost_per_million=cost_per_million(measured.rows_per_s, device, prices, gpu=report.gpu),
        version=version,
    )


def _is_dominated(row: ParetoRow, others: Sequence[ParetoRow], metric: QualityMetric) -> bool:
    """Tell whether another row is at least as good in everything and better in something."""
    mine = _to_minimize(row, metric)
    return any(
        theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True))
        for theirs in (_to_minimize(each, metric) for each in others)
    )


def _to_minimize(row: ParetoRow, metric: QualityMetric) -> tuple[float, ...]:
    sign = -1 if metric in HIGHER_IS_BETTER else 1
    loss = float("inf") if row.quality is None else sign * row.quality
    return row.latency_p50_us, -row.rows_per_s, row.size_bytes, loss, row.cost_per_million or 0.0


def _best(rows: Sequence[ParetoRow]) -> ParetoRow | None:
    """Return the row with the largest gain in throughput and latency together, as a product of both ratios."""
    return max(rows, key=lambda row: row.rows_per_s / max(row.latency_p50_us, 1e-9), default=None)


def _figures(row: ParetoRow, prices: Prices | None) -> str:
    speed = f"{row.rows_per_s:,.0f} rows/s at batches of {row.best_batch}, {row.latency_p50_us:,.0f} µs for one row"
    if row.cost_per_million is None or prices is None:
        return speed
    return f"{speed}, {row.cost_per_million:.4g} {prices.currency} a million predictions"


def _recommendation(row: ParetoRow, words: str) -> Recommendation:
    return Recommendation(
        name=row.name,
        device=row.device,
        version=row.version,
        words=f"{row.device.upper()}, {row.version or row.name} ({row.name}): {words}"[:4000],
    )
