"""Queries of runs, experiments and logged models: their rows, parameters, tags, artifacts, datasets and links."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping, Table, bindparam, delete, func, insert, or_, select, update

from falaj.errors import Conflict, Fault, InvalidInput, NotFound, shorten
from falaj.governance.objects import RowsByIds, resolve, rows_by_ids
from falaj.governance.operations.call import Call
from falaj.governance.tables import objects
from falaj.ports.metadata import Prepared, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, ObjectId
from falaj.records.record import unvalidated
from falaj.records.tracking import (
    Artifact,
    DatasetInput,
    Experiment,
    ListedRun,
    LoggedModel,
    LogResult,
    ModelLink,
    Param,
    Run,
    RunDetails,
    RunName,
    RunStatus,
    Tag,
)
from falaj.tracking import metrics
from falaj.tracking.tables import (
    artifacts,
    datasets,
    experiments,
    inputs,
    model_links,
    models,
    params,
    runs,
    series,
    tags,
)

CONTEXT_TAG = "mlflow.data.context"
"""The tag of a dataset that says what a run used it for."""
NAME_TAG, HISTORY_TAG = "mlflow.runName", "mlflow.log-model.history"
HISTORY_LENGTH = 1_000_000
MOST_TAGS = 10_000
"""Parameters, and tags, of one object."""
SHOWN = 20
"""Keys that an error names."""

_run_name: TypeAdapter[str] = TypeAdapter(RunName)
_run = Prepared(
    select(*runs.c, experiments.c.deleted_at.label("experiment_deleted_at"))
    .outerjoin(experiments, experiments.c.id == runs.c.experiment)
    .where(runs.c.id == bindparam("run"))
)
_state = Prepared(
    select(runs.c.status, runs.c.deleted_at, runs.c.sealed, runs.c.experiment)
    .where(runs.c.id == bindparam("run"))
    .with_for_update()
)
_experiment = Prepared(select(experiments).where(experiments.c.id == bindparam("experiment")))
_marks = RowsByIds(
    select(runs.c.id, runs.c.status, func.sum(series.c.points).label("points"))
    .outerjoin(series, series.c.run == runs.c.id)
    .group_by(runs.c.id, runs.c.status),
    runs.c.id,
)
_experiments = RowsByIds(select(experiments), experiments.c.id)
_model = Prepared(select(models).where(models.c.id == bindparam("model")))
_values = {
    table: Prepared(select(table).where(table.c.run == bindparam("run")).order_by(table.c.key))
    for table in (params, tags)
}
_VALUES_OF = {
    table: f'SELECT run, "key", value FROM {table.name} WHERE run'  # noqa: S608 - names of our own tables
    for table in (params, tags)
}
_artifacts = Prepared(select(artifacts).where(artifacts.c.run == bindparam("run")).order_by(artifacts.c.path))
_inputs_of = RowsByIds(
    select(inputs.c.run, inputs.c.tags, *(column for column in datasets.c if column.name != "experiment"))
    .join(runs, runs.c.id == inputs.c.run)
    .join(
        datasets,
        (datasets.c.experiment == runs.c.experiment)
        & (datasets.c.name == inputs.c.name)
        & (datasets.c.digest == inputs.c.digest),
    ),
    inputs.c.run,
)
_links_of = RowsByIds(select(model_links), model_links.c.run)


class RunState(NamedTuple):
    """What decides whether a run takes more: its status, and whether it is deleted or sealed."""

    status: RunStatus
    deleted_at: datetime | None
    sealed: bool | None
    experiment: ObjectId


# ------------------------------------------------------------------------------------------------ runs


def lock(tx: Transaction, run: ObjectId) -> RunState | None:
    """Return the state of a run, locked until the transaction ends, or None if there is no such run."""
    rows = tx.fetch(_state, {"run": run})
    if not rows:
        return None
    row = rows[0]
    return RunState(RunStatus(row["status"]), row["deleted_at"], row["sealed"], row["experiment"])


def require_active(run: str, state: RunState | None) -> RunState:
    """Return the state of a run that takes more; Conflict if it is deleted, or the run of a job that has ended."""
    if state is not None and state.deleted_at is not None:
        raise Conflict(f"run {run} is deleted; restore it first: runs.restore")
    if state is None or state.sealed:
        status = "unknown" if state is None else state.status.value
        raise Conflict(f"run {run} has ended: {status}; the run of a job takes nothing afterwards")
    return state


def lock_names(tx: Transaction, workspace: ObjectId) -> None:
    """Lock the names of a workspace against other callers of this function until the transaction ends."""
    tx.execute(select(objects.c.id).where(objects.c.id == workspace).with_for_update(key_share=True))


def create_run(
    tx: Transaction,
    new: StoredObject,
    *,
    experiment: ObjectId,
    name: str | None,
    status: RunStatus = RunStatus.RUNNING,
    parent: ObjectId | None = None,
    user: str | None = None,
    started_at: datetime | None = None,
) -> Run:
    row = {
        "id": new.id,
        "experiment": experiment,
        "name": name or new.id,
        "status": status,
        "ended_at": None,
        "parent": parent,
        "user": user,
        "started_at": started_at or new.created_at,
        "deleted_at": None,
        "sealed": None,
    }
    tx.insert(runs, row)
    return run_of(new, row)


def change_run(tx: Transaction, run: ObjectId, **values: Any) -> None:
    tx.update(runs, {"id": run}, values)


def end_run(
    tx: Transaction, run: ObjectId, *, status: str, now: datetime, sealed: bool | None = None
) -> None:
    change_run(tx, run, status=status, ended_at=now, sealed=sealed)


def run_record(tx: Transaction, found: StoredObject) -> Run:
    (row,) = tx.fetch(_run, {"run": found.id})
    return run_of(found, row)


def run_of(found: StoredObject, row: RowMapping | Mapping[str, Any], *, prefix: str = "") -> Run:
    return unvalidated(Run, _run_fields(found, row, prefix=prefix))


def _run_fields(
    found: StoredObject, row: RowMapping | Mapping[str, Any], *, prefix: str = ""
) -> dict[str, Any]:
    return {
        "id": found.id,
        "workspace": found.workspace,
        "experiment": row[f"{prefix}experiment"],
        "name": row[f"{prefix}name"],
        "status": RunStatus(row[f"{prefix}status"]),
        "owner": found.owner,
        "label": found.label,
        "started_at": row[f"{prefix}started_at"],
        "ended_at": row[f"{prefix}ended_at"],
        "parent": row[f"{prefix}parent"],
        "user": row[f"{prefix}user"],
        "deleted_at": row[f"{prefix}deleted_at"] or row.get("experiment_deleted_at"),
    }


def change_marks(tx: Transaction, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return, for each run, what differs once it has new points or another status."""
    return [(*row.values(),) for row in _marks.fetch(tx, idents)]


def details(tx: Transaction, found: StoredObject) -> RunDetails:
    links = model_links_of(tx, [found.id]).get(found.id, {})
    return RunDetails(
        run=run_record(tx, found),
        params=_pairs(Param, values_of(tx, params, found.id).items()),
        tags=_pairs(Tag, values_of(tx, tags, found.id).items()),
        metrics=tuple(metrics.summaries_of_runs(tx, [found.id]).get(found.id, ())),
        artifacts=tuple(artifacts_of(tx, found.id)),
        datasets=tuple(inputs_of(tx, [found.id]).get(found.id, ())),
        models_read=tuple(links.get("read", ())),
        models_made=tuple(links.get("made", ())),
    )


def listed_runs(
    tx: Transaction,
    page: Sequence[tuple[StoredObject, Any]],
    *,
    show: Sequence[str],
    keys: Sequence[str],
) -> tuple[ListedRun, ...]:
    """Return runs of a list with the parts of them that are shown: all metrics, or those with `keys`."""
    idents = [found.id for found, _ in page]
    shown = set(show) if idents else set()
    metrics_of = (
        metrics.summaries_of_runs(tx, idents, keys or None) if idents and ("metrics" in shown or keys) else {}
    )
    params_of = values_of_all(tx, params, idents) if "params" in shown else {}
    tags_of = values_of_all(tx, tags, idents) if "tags" in shown else {}
    datasets_of = inputs_of(tx, idents) if "datasets" in shown else {}
    links = model_links_of(tx, idents) if "models" in shown else {}
    return tuple(
        unvalidated(
            ListedRun,
            _run_fields(found, row, prefix="run_")
            | {
                "params": _pairs(Param, params_of.get(found.id, ())),
                "tags": _pairs(Tag, tags_of.get(found.id, ())),
                "metrics": tuple(metrics_of.get(found.id, ())),
                "datasets": tuple(datasets_of.get(found.id, ())),
                "models_read": tuple(links.get(found.id, {}).get("read", ())),
                "models_made": tuple(links.get(found.id, {}).get("made", ())),
            },
        )
        for found, row in page
    )


# ----------------------------------------------------------------------------------------- experiments


def workspace_of(tx: Transaction, found: StoredObject) -> StoredObject:
    return resolve(tx, found.workspace, kind="workspace", workspace=ROOT)


def create_experiment(tx: Transaction, new: StoredObject) -> None:
    tx.insert(experiments, {"id": new.id, "updated_at": new.created_at, "deleted_at": None})


def change_experiment(tx: Transaction, found: StoredObject, *, now: datetime, **values: Any) -> None:
    tx.update(experiments, {"id": found.id}, {"updated_at": now, **values})


def experiment_deleted_at(tx: Transaction, experiment: str) -> datetime | None:
    (row,) = tx.fetch(_experiment, {"experiment": experiment})
    deleted_at: datetime | None = row["deleted_at"]
    return deleted_at


def experiment_records(tx: Transaction, page: Sequence[StoredObject]) -> list[Experiment]:
    idents = [found.id for found in page]
    rows = {row["id"]: row for row in _experiments.fetch(tx, idents)}
    tags_of = values_of_all(tx, tags, idents)
    return [
        Experiment(
            id=found.id,
            workspace=found.workspace,
            name=found.name,
            owner=found.owner,
            label=found.label,
            tags=_pairs(Tag, tags_of.get(found.id, ())),
            created_at=found.created_at,
            updated_at=rows[found.id]["updated_at"],
            deleted_at=rows[found.id]["deleted_at"],
        )
        for found in page
    ]


# --------------------------------------------------------------------------------------- logged models


def create_model(tx: Transaction, new: StoredObject, row: Mapping[str, Any]) -> None:
    tx.insert(models, {"id": new.id, "updated_at": new.created_at, "deleted_at": None, **row})


def change_model(tx: Transaction, model: ObjectId, *, now: datetime, **values: Any) -> None:
    tx.update(models, {"id": model}, {"updated_at": now, **values})


def model_row(tx: Transaction, model: str) -> dict[str, Any]:
    (row,) = tx.fetch(_model, {"model": model})
    return row


_models = RowsByIds(select(models), models.c.id)


def model_records(tx: Transaction, page: Sequence[StoredObject]) -> list[LoggedModel]:
    idents = [found.id for found in page]
    rows = {row["id"]: row for row in _models.fetch(tx, idents)}
    params_of, tags_of = values_of_all(tx, params, idents), values_of_all(tx, tags, idents)
    metrics_of = metrics.metrics_of_models(tx, idents)
    return [
        LoggedModel(
            id=found.id,
            workspace=found.workspace,
            experiment=rows[found.id]["experiment"],
            name=rows[found.id]["name"],
            status=rows[found.id]["status"],
            owner=found.owner,
            label=found.label,
            source_run=rows[found.id]["source_run"],
            type=rows[found.id]["type"],
            params=_pairs(Param, params_of.get(found.id, ())),
            tags=_pairs(Tag, tags_of.get(found.id, ())),
            metrics=tuple(metrics_of.get(found.id, ())),
            created_at=found.created_at,
            updated_at=rows[found.id]["updated_at"],
            deleted_at=rows[found.id]["deleted_at"],
        )
        for found in page
    ]


# ---------------------------------------------------------------------------------- parameters and tags


def values_of(tx: Transaction, table: Table, owner: ObjectId) -> dict[str, str]:
    """Return the parameters or the tags of an object by key."""
    return {row["key"]: row["value"] for row in tx.fetch(_values[table], {"run": owner})}


def values_of_all(tx: Transaction, table: Table, owners: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the parameters or the tags of several objects, sorted by key."""
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for owner, key, value in rows_by_ids(tx, _VALUES_OF[table], owners):
        found[owner].append((key, value))
    return {owner: sorted(values) for owner, values in found.items()}


P = TypeVar("P", Param, Tag)


def _pairs(kind: type[P], found: Iterable[tuple[str, str]]) -> tuple[P, ...]:
    return tuple([unvalidated(kind, {"key": key, "value": value}) for key, value in found])


def put_values(tx: Transaction, table: Table, owner: ObjectId, values: Mapping[str, str]) -> int:
    """Set parameters or tags, and return how many were not so already; existing ones are replaced."""
    if not values:
        return 0
    known = values_of(tx, table, owner)
    _require_few(table, len(known.keys() | values.keys()))
    new = {key: value for key, value in values.items() if known.get(key) != value}
    for key, value in new.items():
        if key in known:
            tx.update(table, {"run": owner, "key": key}, {"value": value})
    added = [{"run": owner, "key": key, "value": value} for key, value in new.items() if key not in known]
    for row in added:
        tx.insert(table, row)
    return len(new)


def put_run_tags(tx: Transaction, run: ObjectId, values: Mapping[str, str]) -> int:
    """Set tags of a run, and return how many were not so already; its name is one of them."""
    name = values.get(NAME_TAG)
    stored = put_values(tx, tags, run, {key: value for key, value in values.items() if key != NAME_TAG})
    if name is None:
        return stored
    try:
        change_run(tx, run, name=_run_name.validate_python(name))
    except ValidationError:
        raise InvalidInput.at(
            f"tags.{NAME_TAG}", given=name, allowed="1 to 500 characters on one line"
        ) from None
    return stored + 1


def add_to_history(tx: Transaction, run: ObjectId, model: str) -> None:
    """Add the description of a model to those that a run has in a tag: a list, as JSON."""
    try:
        described = json.loads(model)
    except (ValueError, RecursionError):
        raise InvalidInput.at("model", given=model, allowed="the description of a model, as JSON") from None
    matches = tags.c.run == run, tags.c.key == HISTORY_TAG
    known: str | None = tx.execute(select(tags.c.value).where(*matches)).scalar()
    text = json.dumps([*_history(known), described])
    if len(text) > HISTORY_LENGTH:
        raise Conflict(
            f"run {run} would have more than {HISTORY_LENGTH} characters of descriptions of models in {HISTORY_TAG}"
        )
    if known is None:
        tx.insert(tags, {"run": run, "key": HISTORY_TAG, "value": text})
    else:
        tx.update(tags, {"run": run, "key": HISTORY_TAG}, {"value": text})


def _history(text: str | None) -> list[Any]:
    """Return the descriptions that a tag has; one that a client set itself may be anything."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _require_few(table: Table, count: int) -> None:
    if count > MOST_TAGS:
        what = "tags" if table is tags else "parameters"
        raise Conflict(f"it would have {count} {what}; at most {MOST_TAGS} are kept")


def add_params(tx: Transaction, owner: ObjectId, given: Mapping[str, object]) -> int:
    """Add parameters, and return how many are new; Conflict if one would change."""
    if not given:
        return 0
    texts, known = {key: str(value) for key, value in given.items()}, values_of(tx, params, owner)
    changed = [key for key, value in texts.items() if known.get(key, value) != value][:SHOWN]
    if changed:
        faults = [
            Fault(where=f"params.{key}", given=shorten(texts[key]), allowed=shorten(known[key]))
            for key in changed
        ]
        raise Conflict(f"a parameter cannot be changed: {', '.join(changed)}", faults=faults)
    return put_values(tx, params, owner, {key: text for key, text in texts.items() if key not in known})


def delete_tags(call: Call, keys: Sequence[str]) -> LogResult:
    """Delete tags of the object that the call acts on; NotFound if it has none of them."""
    found = call.target
    gone = call.tx.execute(delete(tags).where(tags.c.run == found.id, tags.c.key.in_(keys))).rowcount
    if not gone:
        raise NotFound(f"{found.kind} {found.id} has no tag {', '.join(map(repr, keys[:SHOWN]))}")
    return LogResult(run=found.id, stored=gone, repeated=len(keys) - gone)


# -------------------------------------------------------------------------------------------- artifacts


def artifacts_of(tx: Transaction, owner: ObjectId) -> list[Artifact]:
    return [artifact_record(row) for row in tx.fetch(_artifacts, {"run": owner})]


def artifact_at(tx: Transaction, owner: ObjectId, path: str) -> Artifact | None:
    query = select(artifacts).where(artifacts.c.run == owner, artifacts.c.path == path)
    row = tx.execute(query).mappings().one_or_none()
    return None if row is None else artifact_record(row)


def is_artifact(tx: Transaction, blob: ObjectId) -> bool:
    """Return whether a blob is an artifact of anything."""
    return tx.execute(select(artifacts.c.path).where(artifacts.c.blob == blob).limit(1)).first() is not None


def artifacts_around(tx: Transaction, owner: ObjectId, path: str, above: Sequence[str]) -> list[str]:
    """Return the paths of artifacts in the folders `above` or below `path`; on SQLite also of other case."""
    below = artifacts.c.path.startswith(f"{path}/", autoescape=True)
    query = select(artifacts.c.path).where(artifacts.c.run == owner, or_(artifacts.c.path.in_(above), below))
    return list(tx.execute(query).scalars())


def add_artifact(tx: Transaction, owner: ObjectId, new: Artifact) -> None:
    tx.execute(insert(artifacts), {"run": owner, **new.model_dump()})


def delete_artifacts(tx: Transaction, owner: ObjectId, paths: Iterable[str]) -> None:
    for path in paths:
        tx.execute(delete(artifacts).where(artifacts.c.run == owner, artifacts.c.path == path))


def artifact_record(row: RowMapping | Mapping[str, Any]) -> Artifact:
    return Artifact(
        path=row["path"],
        blob=row["blob"],
        size_bytes=row["size_bytes"],
        attached_at=row["attached_at"],
        unsafe=row["unsafe"],
    )


# --------------------------------------------------------------------------------- datasets and models


def add_inputs(tx: Transaction, run: ObjectId, experiment: ObjectId, given: Sequence[DatasetInput]) -> int:
    """Record the datasets that a run used, and return how many are new; tags of a known one are added."""
    stored = 0
    for each in given:
        identity = {"name": each.name, "digest": each.digest}
        _add_dataset(tx, {"experiment": experiment, **identity}, each)
        matches = [inputs.c.run == run, *(inputs.c[name] == value for name, value in identity.items())]
        known = tx.execute(select(inputs.c.tags).where(*matches)).scalar_one_or_none()
        merged = (known or {}) | each.tags
        values = {"context": merged.get(CONTEXT_TAG), "tags": merged}
        if known is None:
            tx.execute(insert(inputs), {"run": run, **identity, **values})
            stored += 1
        elif merged != known:
            tx.execute(update(inputs).where(*matches).values(**values))
    return stored


def _add_dataset(tx: Transaction, identity: Mapping[str, str], given: DatasetInput) -> None:
    matches = [datasets.c[name] == value for name, value in identity.items()]
    if tx.execute(select(datasets.c.name).where(*matches)).first() is None:
        facts = given.model_dump(include={"source_type", "source", "schema_text", "profile"})
        tx.execute(insert(datasets), {**identity, **facts})


def inputs_of(tx: Transaction, owners: Sequence[str]) -> dict[str, list[DatasetInput]]:
    found: dict[str, list[DatasetInput]] = {}
    for row in sorted(_inputs_of.fetch(tx, owners), key=lambda row: (row["name"], row["digest"])):
        fields = {name: row[name] for name in DatasetInput.model_fields}
        found.setdefault(row["run"], []).append(DatasetInput(**fields))
    return found


def add_model_link(tx: Transaction, run: ObjectId, model: ObjectId, *, role: str, step: int) -> bool:
    """Record that a run read or made a logged model; false if that is known."""
    key = {"run": run, "model": model, "role": role}
    matches = [model_links.c[name] == value for name, value in key.items()]
    if tx.execute(select(model_links.c.step).where(*matches)).first() is not None:
        return False
    tx.execute(insert(model_links), {**key, "step": step})
    return True


def model_links_of(tx: Transaction, owners: Sequence[str]) -> dict[str, dict[str, list[ModelLink]]]:
    """Return the logged models of runs by run and by role: read or made."""
    found: dict[str, dict[str, list[ModelLink]]] = {}
    for row in sorted(_links_of.fetch(tx, owners), key=lambda row: (row["step"], row["model"])):
        link = ModelLink(model=row["model"], step=row["step"])
        found.setdefault(row["run"], {}).setdefault(row["role"], []).append(link)
    return found
