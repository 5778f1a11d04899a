"""What runs, experiments and logged models are searched by."""

from __future__ import annotations

from sqlalchemy import func

from falaj.governance.search.filters import ValueKind, Vocabulary
from falaj.governance.search.queries import KeyedValues, Searched, listed_query
from falaj.governance.tables import objects
from falaj.tracking.store import NAME_TAG
from falaj.tracking.tables import experiments, inputs, model_metrics, models, params, runs, series, tags

PARENT_TAG = "mlflow.parentRunId"

RUN_WORDS = Vocabulary(
    frozenset({"metrics", "params", "tags", "attributes", "datasets"}),
    {
        **dict.fromkeys(("run_id", "id"), "id"),
        **dict.fromkeys(("run_name", "run name", "name"), "name"),
        **dict.fromkeys(("start_time", "created", "started_at"), "started_at"),
        **dict.fromkeys(("end_time", "ended_at"), "ended_at"),
        **dict.fromkeys(("user_id", "user"), "user"),
        **dict.fromkeys(("parent", "parent_run_id"), "parent"),
        "status": "status",
    },
    {"status": ValueKind.STATUS, "started_at": ValueKind.TIME, "ended_at": ValueKind.TIME},
)
EXPERIMENT_WORDS = Vocabulary(
    frozenset({"tags", "attributes"}),
    {
        **dict.fromkeys(("experiment_id", "id"), "id"),
        "name": "name",
        **dict.fromkeys(("creation_time", "created_at"), "created_at"),
        **dict.fromkeys(("last_update_time", "updated_at"), "updated_at"),
    },
    {"created_at": ValueKind.TIME, "updated_at": ValueKind.TIME},
)
MODEL_WORDS = Vocabulary(
    frozenset({"metrics", "params", "tags", "attributes"}),
    {
        **dict.fromkeys(("model_id", "id"), "id"),
        "name": "name",
        **dict.fromkeys(("model_type", "type"), "type"),
        "status": "status",
        **dict.fromkeys(("source_run_id", "source_run"), "source_run"),
        **dict.fromkeys(("creation_timestamp", "creation_time", "created_at"), "created_at"),
        **dict.fromkeys(("last_updated_timestamp", "last_updated_time", "updated_at"), "updated_at"),
    },
    {"status": ValueKind.STATUS, "created_at": ValueKind.TIME, "updated_at": ValueKind.TIME},
)

_PARAMS, _TAGS = KeyedValues(params, "run"), KeyedValues(tags, "run")

RUNS = Searched(
    kind="run",
    words=RUN_WORDS,
    query=listed_query(
        *(column.label(f"run_{column.name}") for column in runs.c if column.name not in ("id", "sealed")),
        experiments.c.deleted_at.label("experiment_deleted_at"),
    )
    .join(runs, runs.c.id == objects.c.id)
    .outerjoin(experiments, experiments.c.id == runs.c.experiment),
    id=runs.c.id,
    attributes={
        "id": runs.c.id,
        "name": runs.c.name,
        "status": runs.c.status,
        "started_at": runs.c.started_at,
        "ended_at": runs.c.ended_at,
        "user": func.coalesce(runs.c.user, objects.c.owner),
        "parent": runs.c.parent,
    },
    deleted=(runs.c.deleted_at, experiments.c.deleted_at),
    values={"params": _PARAMS, "tags": _TAGS, "metrics": KeyedValues(series, "run", "last")},
    fields={"datasets": inputs},
    tags={NAME_TAG: runs.c.name},
    tags_besides={PARENT_TAG: runs.c.parent},
)
EXPERIMENTS = Searched(
    kind="experiment",
    words=EXPERIMENT_WORDS,
    query=listed_query(experiments.c.updated_at, experiments.c.deleted_at.label("gone_at"))
    .outerjoin(experiments, experiments.c.id == objects.c.id)
    .where(objects.c.kind == "experiment"),
    id=objects.c.id,
    attributes={
        "id": objects.c.id,
        "name": objects.c.name,
        "created_at": objects.c.created_at,
        "updated_at": func.coalesce(experiments.c.updated_at, objects.c.created_at),
    },
    deleted=(experiments.c.deleted_at,),
    values={"tags": _TAGS},
)
MODELS = Searched(
    kind="logged_model",
    words=MODEL_WORDS,
    query=listed_query(*(column.label(f"model_{column.name}") for column in models.c)).join(
        models, models.c.id == objects.c.id
    ),
    id=models.c.id,
    attributes={
        "id": models.c.id,
        "name": models.c.name,
        "type": models.c.type,
        "status": models.c.status,
        "source_run": models.c.source_run,
        "created_at": objects.c.created_at,
        "updated_at": models.c.updated_at,
    },
    deleted=(models.c.deleted_at,),
    values={
        "params": _PARAMS,
        "tags": _TAGS,
        "metrics": KeyedValues(model_metrics, "model", several=True),
    },
)
