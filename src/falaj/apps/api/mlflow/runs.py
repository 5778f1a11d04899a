"""Routes of runs: what is logged to them, and how they are searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from falaj.apps.api.mlflow.experiments import experiment_ref
from falaj.apps.api.mlflow.route import (
    API,
    KeyValue,
    MlflowRoute,
    key_values,
    lifecycle,
    millis,
    moment,
    next_page,
    number,
    of_mapping,
    page_size,
    pairs,
    view,
)
from falaj.errors import InvalidInput
from falaj.records.tracking import (
    DatasetInput,
    ListedRun,
    Metric,
    ModelLink,
    PointColumns,
    Run,
    RunDetails,
    Tag,
)

NAME_TAG, PARENT_TAG = "mlflow.runName", "mlflow.parentRunId"
STATUSES = {"RUNNING": 1, "SCHEDULED": 2, "FINISHED": 3, "FAILED": 4, "KILLED": 5}
RUN_ID = re.compile(r"run_[0-9a-z]{26}")


class CreateRun(msgspec.Struct):
    experiment_id: str = "0"
    user_id: str = ""
    run_name: str = ""
    start_time: int | None = None
    tags: list[KeyValue] = []


class RunId(msgspec.Struct):
    run_id: str = ""
    run_uuid: str = ""

    @property
    def run(self) -> str:
        """The id; old clients call it `run_uuid`."""
        return self.run_id or self.run_uuid


class UpdateRun(RunId):
    status: str | int | None = None
    end_time: int | None = None
    run_name: str = ""


class LoggedPoint(msgspec.Struct):
    key: str
    value: float | str
    timestamp: int | None = None
    step: int = 0
    model_id: str | None = None
    dataset_name: str | None = None
    dataset_digest: str | None = None


class LogMetric(RunId):
    key: str = ""
    value: float | str = ""
    timestamp: int | None = None
    step: int = 0
    model_id: str | None = None
    dataset_name: str | None = None
    dataset_digest: str | None = None


class RunKeyValue(RunId):
    key: str = ""
    value: str = ""


class LogBatch(RunId):
    metrics: list[LoggedPoint] = []
    params: list[KeyValue] = []
    tags: list[KeyValue] = []


class LogModel(RunId):
    model_json: str = ""


class LoggedDataset(msgspec.Struct):
    name: str
    digest: str
    source_type: str = "local"
    source: str = ""
    schema: str | None = None
    profile: str | None = None


class LoggedInput(msgspec.Struct):
    dataset: LoggedDataset
    tags: list[KeyValue] = []


class LinkedModel(msgspec.Struct):
    model_id: str
    step: int = 0


class LogInputs(RunId):
    datasets: list[LoggedInput] = []
    models: list[LinkedModel] = []


class LogOutputs(RunId):
    models: list[LinkedModel] = []


class SearchRuns(msgspec.Struct):
    experiment_ids: list[str] = []
    filter: str = ""
    run_view_type: str | int | None = None
    max_results: int | None = None
    order_by: list[str] = []
    page_token: str = ""


# ------------------------------------------------------------------------------------------- documents


def run_info(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.id,
        "run_uuid": run.id,
        "run_name": run.name,
        "experiment_id": run.experiment,
        "user_id": run.user or run.owner,
        "status": run.status.value.upper(),
        "start_time": millis(run.started_at),
        **({} if run.ended_at is None else {"end_time": millis(run.ended_at)}),
        "artifact_uri": f"mlflow-artifacts:/runs/{run.id}/artifacts",
        "lifecycle_stage": lifecycle(run),
    }


def _tags(run: Run, tags: Sequence[Tag]) -> list[dict[str, str]]:
    named = {NAME_TAG: run.name} | ({PARENT_TAG: run.parent} if run.parent else {})
    return of_mapping(named) + key_values(tag for tag in tags if tag.key not in named)


def _metrics(found: Sequence[Metric]) -> list[dict[str, Any]]:
    return [
        {
            "key": each.key,
            "value": number(each.last),
            "timestamp": millis(each.last_timestamp),
            "step": each.last_step,
        }
        for each in found
    ]


def _inputs(datasets: Sequence[DatasetInput], models: Sequence[ModelLink]) -> dict[str, Any]:
    return {
        "dataset_inputs": [
            {
                "tags": of_mapping(each.tags),
                "dataset": {
                    "name": each.name,
                    "digest": each.digest,
                    "source_type": each.source_type,
                    "source": each.source,
                    **({} if each.schema_text is None else {"schema": each.schema_text}),
                    **({} if each.profile is None else {"profile": each.profile}),
                },
            }
            for each in datasets
        ],
        "model_inputs": [{"model_id": each.model} for each in models],
    }


def run_document(run: Run, logged: RunDetails | ListedRun) -> dict[str, Any]:
    found: dict[str, Any] = {
        "info": run_info(run),
        "data": {
            "metrics": _metrics(logged.metrics),
            "params": key_values(logged.params),
            "tags": _tags(run, logged.tags),
        },
    }
    if logged.datasets or logged.models_read:
        found["inputs"] = _inputs(logged.datasets, logged.models_read)
    if logged.models_made:
        made = [{"model_id": each.model, "step": each.step} for each in logged.models_made]
        found["outputs"] = {"model_outputs": made}
    return found


# -------------------------------------------------------------------------------------------- requests


def _create(request: CreateRun) -> dict[str, Any]:
    tags = pairs(request.tags, "tags")
    name, parent = request.run_name or tags.pop(NAME_TAG, ""), tags.get(PARENT_TAG, "")
    tags.pop(NAME_TAG, None)
    return {
        "experiment": experiment_ref(request.experiment_id),
        "name": name or None,
        "tags": tags,
        "parent": parent if RUN_ID.fullmatch(parent) else None,
        "started_at": None if request.start_time is None else moment(request.start_time),
        "user": request.user_id or None,
    }


def _created(request: CreateRun, run: Run) -> dict[str, Any]:
    tags = [Tag(key=each.key, value=each.value) for each in request.tags]
    return {"run": {"info": run_info(run), "data": {"tags": _tags(run, tags)}}}


def _update(request: UpdateRun) -> dict[str, Any]:
    status = request.status
    names = {value: name for name, value in STATUSES.items()}
    name = names.get(status, "") if isinstance(status, int) else status
    if name is not None and name not in STATUSES:
        raise InvalidInput.at("status", given=status, allowed=", ".join(STATUSES))
    return {
        "run": request.run,
        "name": request.run_name or None,
        "status": None if name is None else name.lower(),
        "ended_at": None if request.end_time is None else moment(request.end_time),
    }


def _point(each: LoggedPoint | LogMetric) -> dict[str, Any]:
    found: dict[str, Any] = {"key": each.key, "value": each.value, "step": each.step}
    if each.timestamp is not None:
        found["timestamp"] = moment(each.timestamp)
    if each.model_id:
        found |= {"model": each.model_id}
    if each.dataset_name:
        found |= {"dataset": each.dataset_name, "dataset_digest": each.dataset_digest}
    return found


def _points(given: Sequence[LoggedPoint | LogMetric]) -> PointColumns | list[dict[str, Any]]:
    """Return points as columns if they are plainly valid, else so that the operation tells what is wrong with them."""
    moments = [each.timestamp for each in given]
    if None not in moments and not any(each.model_id or each.dataset_name for each in given):
        found = PointColumns.checked(
            [each.key for each in given],
            [each.step for each in given],
            [1000 * at for at in moments],  # type: ignore[operator]
            [each.value for each in given],
        )
        if found is not None:
            return found
    return [_point(each) for each in given]


def _batch(request: LogBatch) -> dict[str, Any]:
    return {
        "run": request.run,
        "metrics": _points(request.metrics),
        "params": pairs(request.params, "params"),
        "tags": {each.key: each.value for each in request.tags},
    }


def _log_inputs(request: LogInputs) -> dict[str, Any]:
    return {
        "run": request.run,
        "datasets": [
            {
                "name": each.dataset.name,
                "digest": each.dataset.digest,
                "source_type": each.dataset.source_type,
                "source": each.dataset.source,
                "schema_text": each.dataset.schema,
                "profile": each.dataset.profile,
                "tags": pairs(each.tags, "tags"),
            }
            for each in request.datasets
        ],
        "models": _links(request.models),
    }


def _links(given: Sequence[LinkedModel]) -> list[dict[str, Any]]:
    return [{"model": each.model_id, "step": each.step} for each in given]


def _search(request: SearchRuns) -> dict[str, Any]:
    return {
        "experiments": [experiment_ref(ident) for ident in request.experiment_ids],
        "where": request.filter,
        "order_by": request.order_by,
        "view": view(request.run_view_type),
        "show": ("params", "tags", "metrics", "datasets", "models"),
        "after": request.page_token,
        "limit": page_size(request.max_results),
    }


def _found(_request: Any, page: Any) -> dict[str, Any]:
    return {"runs": [run_document(each, each) for each in page.items], **next_page(page)}


def _named(request: RunId) -> dict[str, Any]:
    return {"run": request.run}


ROUTES = [
    MlflowRoute("POST", f"{API}/runs/create", "runs.start", CreateRun, _create, _created),
    MlflowRoute(
        "GET",
        f"{API}/runs/get",
        "runs.show",
        RunId,
        _named,
        lambda _, found: {"run": run_document(found.run, found)},
    ),
    MlflowRoute(
        "POST",
        f"{API}/runs/update",
        "runs.update",
        UpdateRun,
        _update,
        lambda _, run: {"run_info": run_info(run)},
    ),
    MlflowRoute("POST", f"{API}/runs/delete", "runs.delete", RunId, _named),
    MlflowRoute("POST", f"{API}/runs/restore", "runs.restore", RunId, _named),
    MlflowRoute("POST", f"{API}/runs/search", "runs.list", SearchRuns, _search, _found),
    MlflowRoute(
        "POST",
        f"{API}/runs/log-metric",
        "runs.log_metrics",
        LogMetric,
        lambda request: {"run": request.run, "points": _points([request])},
    ),
    MlflowRoute(
        "POST",
        f"{API}/runs/log-parameter",
        "runs.log_params",
        RunKeyValue,
        lambda request: {"run": request.run, "params": {request.key: request.value}},
    ),
    MlflowRoute(
        "POST",
        f"{API}/runs/set-tag",
        "runs.set_tags",
        RunKeyValue,
        lambda request: {"run": request.run, "tags": {request.key: request.value}},
    ),
    MlflowRoute(
        "POST",
        f"{API}/runs/delete-tag",
        "runs.delete_tags",
        RunKeyValue,
        lambda request: {"run": request.run, "keys": (request.key,)},
    ),
    MlflowRoute("POST", f"{API}/runs/log-batch", "runs.log_batch", LogBatch, _batch),
    MlflowRoute(
        "POST",
        f"{API}/runs/log-model",
        "runs.log_model",
        LogModel,
        lambda request: {"run": request.run, "model": request.model_json},
    ),
    MlflowRoute("POST", f"{API}/runs/log-inputs", "runs.log_inputs", LogInputs, _log_inputs),
    MlflowRoute(
        "POST",
        f"{API}/runs/outputs",
        "runs.log_outputs",
        LogOutputs,
        lambda request: {"run": request.run, "models": _links(request.models)},
    ),
]
