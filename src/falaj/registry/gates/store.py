"""SQL of the gates of aliases: rules, measurements and waivers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import groupby

from sqlalchemy import insert, select, update

from falaj.governance import objects
from falaj.ports.metadata import Transaction
from falaj.records.models.gates import (
    EvaluationReport,
    GateResult,
    GateRules,
    GateWaiver,
    MetricMeasurement,
)
from falaj.records.names import ObjectId
from falaj.registry.tables import evaluations, gates, measurements, waivers


def rules_of(tx: Transaction, model: ObjectId, alias: str) -> GateRules:
    """Return the gates of an alias that apply now."""
    query = select(gates).where(gates.c.model == model, gates.c.alias == alias)
    row = tx.execute(query.order_by(gates.c.seq.desc()).limit(1)).mappings().first()
    if row is None:
        return GateRules(alias=alias)
    return GateRules(
        alias=alias,
        metrics=tuple(row["rules"]["metrics"]),
        checks=tuple(row["rules"]["checks"]),
        on=row["data"],
        target=row["rules"].get("target"),
        seq=row["seq"],
        by=objects.name_of(tx, row["by"]),
        at=row["at"],
    )


def set_rules(tx: Transaction, model: ObjectId, rules: GateRules, *, by: str, at: datetime) -> GateRules:
    """Add the next gates of an alias that the caller has locked."""
    seq = rules_of(tx, model, rules.alias).seq + 1
    row = {"model": model, "alias": rules.alias, "seq": seq, "data": rules.on, "by": by, "at": at}
    kept = {"metrics": list(rules.metrics), "checks": list(rules.checks), "target": rules.target}
    tx.execute(insert(gates), row | {"rules": kept})
    return rules_of(tx, model, rules.alias)


def measurements_of(tx: Transaction, version: ObjectId) -> list[MetricMeasurement]:
    """Return the measurements of a version, reported and computed, oldest first; `on` is the id of the set."""
    found = [*_reported(tx, version), *evaluations_of(tx, version)]
    return sorted(found, key=lambda each: (each.at, each.on, each.job or ""))


def evaluations_of(tx: Transaction, version: ObjectId) -> list[MetricMeasurement]:
    """Return the metrics of a version that jobs computed, oldest first; `on` is the id of the set."""
    query = select(evaluations).where(evaluations.c.version == version)
    rows = tx.execute(query.order_by(evaluations.c.at, evaluations.c.data, evaluations.c.target)).mappings()
    return [
        MetricMeasurement(
            version=objects.name_of(tx, version),
            on=row["data"],
            by=objects.name_of(tx, row["by"]),
            **{name: row[name] for name in ("metrics", "job", "target", "output", "rows", "skipped", "at")},
        )
        for row in rows
    ]


def add_evaluation(
    tx: Transaction,
    version: ObjectId,
    data: ObjectId,
    report: EvaluationReport,
    *,
    job: ObjectId,
    by: str,
    at: datetime,
) -> None:
    row = {"version": version, "data": data, "job": job, "by": by, "at": at}
    tx.execute(insert(evaluations), row | report.model_dump())


def _reported(tx: Transaction, version: ObjectId) -> list[MetricMeasurement]:
    query = select(measurements).where(measurements.c.version == version)
    order = measurements.c.at, measurements.c.data, measurements.c.run, measurements.c.by
    rows = tx.execute(query.order_by(*order, measurements.c.metric)).mappings().all()
    found = []
    for (data, run, by, at), group in groupby(
        rows, lambda row: (row["data"], row["run"], row["by"], row["at"])
    ):
        found.append(
            MetricMeasurement(
                version=objects.name_of(tx, version),
                on=data,
                metrics={row["metric"]: row["value"] for row in group},
                run=run,
                by=objects.name_of(tx, by),
                at=at,
            )
        )
    return found


def measured(tx: Transaction, version: ObjectId, data: ObjectId) -> dict[str, float]:
    """Return the metrics of a version on a set."""
    query = select(measurements.c.metric, measurements.c.value)
    query = query.where(measurements.c.version == version, measurements.c.data == data)
    return {row.metric: row.value for row in tx.execute(query)}


def add_measurement(
    tx: Transaction,
    version: ObjectId,
    data: ObjectId,
    metrics: Mapping[str, float],
    *,
    run: ObjectId | None,
    by: str,
    at: datetime,
) -> None:
    same = {"version": version, "data": data, "run": run, "by": by, "at": at}
    rows = [same | {"metric": metric, "value": value} for metric, value in metrics.items()]
    tx.execute(insert(measurements), rows)


def waivers_of(tx: Transaction, version: ObjectId, alias: str) -> list[GateWaiver]:
    """Return the valid waivers of a version for an alias, oldest first."""
    query = select(waivers).where(waivers.c.version == version, waivers.c.alias == alias)
    query = query.where(waivers.c.withdrawn_at.is_(None))
    return [
        GateWaiver(
            id=row["id"],
            version=objects.name_of(tx, version),
            alias=alias,
            gates=tuple(GateResult.model_validate(each) for each in row["gates"]),
            reason=row["reason"],
            by=objects.name_of(tx, row["by"]),
            at=row["at"],
        )
        for row in tx.execute(query.order_by(waivers.c.at, waivers.c.id)).mappings()
    ]


def add_waiver(
    tx: Transaction,
    ident: ObjectId,
    *,
    version: ObjectId,
    alias: str,
    gates: tuple[GateResult, ...],
    reason: str,
    by: str,
    at: datetime,
) -> None:
    row = {"id": ident, "version": version, "alias": alias, "reason": reason, "by": by, "at": at}
    tx.execute(insert(waivers), row | {"gates": [each.model_dump(mode="json") for each in gates]})


def withdraw_waivers(tx: Transaction, version: ObjectId, alias: str, *, at: datetime) -> None:
    """Withdraw the valid waivers of a version for an alias."""
    holding = waivers.c.version == version, waivers.c.alias == alias, waivers.c.withdrawn_at.is_(None)
    tx.execute(update(waivers).where(*holding).values(withdrawn_at=at))
