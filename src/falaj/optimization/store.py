"""SQL of optimization."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select

from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.optimization.pareto import pareto_table, recommend
from falaj.optimization.tables import optimizations
from falaj.ports.metadata import Transaction
from falaj.records.config import Prices
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.optimization import (
    AcceptanceBudget,
    Optimization,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)


def add(call: Call, new: StoredObject, facts: dict[str, Any]) -> None:
    call.tx.execute(insert(optimizations), {"id": new.id, **facts})


def optimization_record(
    tx: Transaction, found: StoredObject, *, prices: Prices | None = None
) -> Optimization:
    row = tx.execute(select(optimizations).where(optimizations.c.id == found.id)).mappings().one()
    report = OptimizationReport.model_validate(row["report"])
    model = objects.name_of(tx, row["model"])
    table = pareto_table(report, model=model, prices=prices)
    return Optimization(
        id=found.id,
        workspace=found.workspace,
        model=model,
        data=objects.name_of(tx, row["data"]),
        held_out=None if row["held_out"] is None else objects.name_of(tx, row["held_out"]),
        target=row["target"],
        features=tuple(row["features"]),
        budget=AcceptanceBudget.model_validate(row["budget"]),
        job=row["job"],
        student=row["student"],
        report=report,
        created_at=found.created_at,
        table=table,
        recommendation=recommend(table, report, prices=prices),
        currency=None if prices is None else prices.currency,
    )


def accepted_variants(tx: Transaction, version: ObjectId) -> list[tuple[OptimizationReport, Variant]]:
    """Return the accepted variants of a model version that were registered, those of the newest report first."""
    query = select(optimizations.c.id, optimizations.c.report).where(optimizations.c.model == version)
    rows = tx.execute(query.order_by(optimizations.c.id.desc())).mappings()  # ids grow with time
    reports = [OptimizationReport.model_validate(row["report"]) for row in rows]
    return [
        (report, each)
        for report in reports
        for each in report.variants
        if each.verdict is OptimizationVerdict.ACCEPTED and each.version is not None
    ]
