"""Removes runs, logged models and experiments for good that were deleted long enough ago."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Table, delete, or_, select

from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.names import ObjectId
from falaj.records.tracking import RunCleanup
from falaj.tracking import store, uploads
from falaj.tracking.artifacts import delete_own_blobs
from falaj.tracking.tables import (
    batches,
    blocks,
    datasets,
    experiments,
    inputs,
    model_links,
    model_metrics,
    models,
    params,
    runs,
    series,
    tags,
)

AT_ONCE = 100
"""Objects that one transaction removes: it blocks other writers of SQLite meanwhile."""


def remove_deleted(call: Call, *, before: datetime) -> RunCleanup:
    """Remove up to so many objects that were deleted before a moment; `more` if others are left."""
    tx = call.tx
    gone = select(experiments.c.id).where(experiments.c.deleted_at < before)
    found_runs = _deleted(tx, runs, gone, before)
    for run in found_runs:
        _remove_run(call, run)
    found_models = _deleted(tx, models, gone, before)
    for model in found_models:
        _remove_model(call, model)
    expired = uploads.remove_expired(call, limit=AT_ONCE)
    more = AT_ONCE in (len(found_runs), len(found_models), expired)
    removed = [] if more else list(tx.execute(gone.limit(AT_ONCE)).scalars())
    for experiment in removed:
        tx.execute(delete(datasets).where(datasets.c.experiment == experiment))
        tx.execute(delete(tags).where(tags.c.run == experiment))
        tx.execute(delete(experiments).where(experiments.c.id == experiment))
        objects.delete(tx, experiment, at=call.now)
    return RunCleanup(
        runs=len(found_runs),
        models=len(found_models),
        experiments=len(removed),
        uploads=expired,
        more=more or len(removed) == AT_ONCE,
    )


def _deleted(tx: Transaction, table: Table, gone: object, before: datetime) -> Sequence[ObjectId]:
    query = select(table.c.id).where(
        or_(table.c.deleted_at < before, table.c.experiment.in_(gone))  # type: ignore[arg-type]
    )
    return list(tx.execute(query.limit(AT_ONCE)).scalars())


def _remove_run(call: Call, run: ObjectId) -> None:
    tx = call.tx
    gone = store.artifacts_of(tx, run)
    store.delete_artifacts(tx, run, [each.path for each in gone])
    delete_own_blobs(call, run, gone)
    numbers = select(series.c.id).where(series.c.run == run)
    tx.execute(delete(blocks).where(blocks.c.series.in_(numbers)))
    for table in (series, batches, params, tags, inputs, model_links, model_metrics):
        tx.execute(delete(table).where(table.c.run == run))
    tx.execute(delete(runs).where(runs.c.id == run))
    objects.delete(tx, run, at=call.now)


def _remove_model(call: Call, model: ObjectId) -> None:
    tx = call.tx
    gone = store.artifacts_of(tx, model)
    store.delete_artifacts(tx, model, [each.path for each in gone])
    delete_own_blobs(call, model, gone)
    for table in (params, tags):
        tx.execute(delete(table).where(table.c.run == model))
    for table in (model_links, model_metrics):
        tx.execute(delete(table).where(table.c.model == model))
    tx.execute(delete(models).where(models.c.id == model))
    objects.delete(tx, model, at=call.now)
