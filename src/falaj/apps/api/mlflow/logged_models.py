"""Routes of logged models, which clients of MLflow 3 make before they register a version."""

from __future__ import annotations

from typing import Any

import msgspec

from falaj.apps.api.mlflow.experiments import experiment_ref
from falaj.apps.api.mlflow.route import (
    API,
    KeyValue,
    MlflowRoute,
    key_values,
    millis,
    next_page,
    number,
    page_size,
    pairs,
)
from falaj.errors import InvalidInput
from falaj.records.tracking import LoggedModel

STATUSES = {
    "LOGGED_MODEL_PENDING": "pending",
    "LOGGED_MODEL_READY": "ready",
    "LOGGED_MODEL_UPLOAD_FAILED": "failed",
}
NUMBERS = {"pending": 1, "ready": 2, "failed": 3}


class CreateLoggedModel(msgspec.Struct):
    experiment_id: str = "0"
    name: str = ""
    model_type: str = ""
    source_run_id: str = ""
    params: list[KeyValue] = []
    tags: list[KeyValue] = []


class ModelId(msgspec.Struct):
    model_id: str


class FinalizeLoggedModel(ModelId):
    status: str | int = "LOGGED_MODEL_READY"


class LoggedModelTags(ModelId):
    tags: list[KeyValue] = []


class LoggedModelTagKey(ModelId):
    tag_key: str


class LoggedModelParams(ModelId):
    params: list[KeyValue] = []


class OrderedBy(msgspec.Struct):
    field_name: str
    ascending: bool = True


class SearchLoggedModels(msgspec.Struct):
    experiment_ids: list[str] = []
    filter: str = ""
    order_by: list[OrderedBy] = []
    max_results: int | None = None
    page_token: str = ""


def model_document(found: LoggedModel) -> dict[str, Any]:
    spelled = {plain: name for name, plain in STATUSES.items()}
    return {
        "info": {
            "model_id": found.id,
            "experiment_id": found.experiment,
            "name": found.name,
            "creation_timestamp_ms": millis(found.created_at),
            "last_updated_timestamp_ms": millis(found.updated_at),
            "artifact_uri": f"mlflow-artifacts:/models/{found.id}/artifacts",
            "status": spelled[found.status],
            "model_type": found.type,
            **({"source_run_id": found.source_run} if found.source_run else {}),
            "tags": key_values(found.tags),
        },
        "data": {
            "params": key_values(found.params),
            "metrics": [
                {
                    "key": each.key,
                    "value": number(each.value),
                    "timestamp": millis(each.timestamp),
                    "step": each.step,
                    "model_id": found.id,
                    "run_id": each.run,
                    **({"dataset_name": each.dataset} if each.dataset else {}),
                    **({"dataset_digest": each.dataset_digest} if each.dataset_digest else {}),
                }
                for each in found.metrics
            ],
        },
    }


def _shown(_request: Any, found: LoggedModel) -> dict[str, Any]:
    return {"model": model_document(found)}


def _status(request: FinalizeLoggedModel) -> dict[str, Any]:
    numbers: dict[str | int, str] = {number: plain for plain, number in NUMBERS.items()}
    status = (numbers | STATUSES).get(request.status)
    if status is None:
        raise InvalidInput.at("status", given=request.status, allowed=", ".join(STATUSES))
    return {"model": request.model_id, "status": status}


def _create(request: CreateLoggedModel) -> dict[str, Any]:
    return {
        "experiment": experiment_ref(request.experiment_id),
        "name": request.name or None,
        "model_type": request.model_type,
        "source_run": request.source_run_id or None,
        "params": pairs(request.params, "params"),
        "tags": pairs(request.tags, "tags"),
    }


def _search(request: SearchLoggedModels) -> dict[str, Any]:
    return {
        "experiments": [experiment_ref(ident) for ident in request.experiment_ids],
        "where": request.filter,
        "order_by": [f"{each.field_name} {'ASC' if each.ascending else 'DESC'}" for each in request.order_by],
        "after": request.page_token,
        "limit": page_size(request.max_results),
    }


MODEL = f"{API}/logged-models/{{model_id}}"
ROUTES = [
    MlflowRoute("POST", f"{API}/logged-models", "loggedmodels.create", CreateLoggedModel, _create, _shown),
    MlflowRoute(
        "POST",
        f"{API}/logged-models/search",
        "loggedmodels.list",
        SearchLoggedModels,
        _search,
        lambda _, page: {"models": [model_document(each) for each in page.items], **next_page(page)},
    ),
    MlflowRoute(
        "GET",
        MODEL,
        "loggedmodels.show",
        ModelId,
        lambda request: {"model": request.model_id},
        _shown,
    ),
    MlflowRoute("PATCH", MODEL, "loggedmodels.finalize", FinalizeLoggedModel, _status, _shown),
    MlflowRoute("DELETE", MODEL, "loggedmodels.delete", ModelId, lambda request: {"model": request.model_id}),
    MlflowRoute(
        "PATCH",
        f"{MODEL}/tags",
        "loggedmodels.set_tags",
        LoggedModelTags,
        lambda request: {"model": request.model_id, "tags": pairs(request.tags, "tags")},
        _shown,
    ),
    MlflowRoute(
        "DELETE",
        f"{MODEL}/tags/{{tag_key}}",
        "loggedmodels.delete_tags",
        LoggedModelTagKey,
        lambda request: {"model": request.model_id, "keys": (request.tag_key,)},
    ),
    MlflowRoute(
        "POST",
        f"{MODEL}/params",
        "loggedmodels.log_params",
        LoggedModelParams,
        lambda request: {"model": request.model_id, "params": pairs(request.params, "params")},
    ),
]
