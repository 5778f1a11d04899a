"""SQL of optimization."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select

from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.optimization.tables import optimizations
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.optimization import AcceptanceBudget, Optimization, OptimizationReport


def add(call: Call, new: StoredObject, facts: dict[str, Any]) -> Optimization:
    call.tx.execute(insert(optimizations), {"id": new.id, **facts})
    return optimization_record(call.tx, new)


def optimization_record(tx: Transaction, found: StoredObject) -> Optimization:
    row = tx.execute(select(optimizations).where(optimizations.c.id == found.id)).mappings().one()
    return Optimization(
        id=found.id,
        workspace=found.workspace,
        model=objects.name_of(tx, row["model"]),
        data=objects.name_of(tx, row["data"]),
        target=row["target"],
        features=tuple(row["features"]),
        budget=AcceptanceBudget.model_validate(row["budget"]),
        job=row["job"],
        report=OptimizationReport.model_validate(row["report"]),
        created_at=found.created_at,
    )
