"""Routes of experiments."""

from __future__ import annotations

from typing import Any

import msgspec

from falaj.apps.api.mlflow.route import (
    API,
    KeyValue,
    MlflowRoute,
    key_values,
    lifecycle,
    millis,
    next_page,
    page_size,
    pairs,
    view,
)
from falaj.records.tracking import Experiment

DEFAULT_ID, DEFAULT_NAME = "0", "Default"
"""The experiment of clients that name none; it has the name that MLflow gives it, and is made by its first run."""


def experiment_ref(ident: str) -> str:
    return DEFAULT_NAME if ident == DEFAULT_ID else ident


class CreateExperiment(msgspec.Struct):
    name: str
    tags: list[KeyValue] = []


class ExperimentId(msgspec.Struct):
    experiment_id: str


class ExperimentByName(msgspec.Struct):
    experiment_name: str


class UpdateExperiment(msgspec.Struct):
    experiment_id: str
    new_name: str


class SearchExperiments(msgspec.Struct):
    max_results: int | None = None
    page_token: str = ""
    filter: str = ""
    order_by: list[str] = []
    view_type: str | int | None = None


class ExperimentTag(msgspec.Struct):
    experiment_id: str
    key: str
    value: str = ""


def experiment_document(found: Experiment) -> dict[str, Any]:
    return {
        "experiment_id": found.id,
        "name": found.name,
        "artifact_location": f"mlflow-artifacts:/experiments/{found.id}",
        "lifecycle_stage": lifecycle(found),
        "creation_time": millis(found.created_at),
        "last_update_time": millis(found.updated_at),
        "tags": key_values(found.tags),
    }


def _shown(_request: Any, found: Experiment) -> dict[str, Any]:
    return {"experiment": experiment_document(found)}


def _named(request: ExperimentId) -> dict[str, Any]:
    return {"experiment": experiment_ref(request.experiment_id)}


def _search(request: SearchExperiments) -> dict[str, Any]:
    return {
        "where": request.filter,
        "order_by": request.order_by,
        "view": view(request.view_type),
        "after": request.page_token,
        "limit": page_size(request.max_results),
    }


def _found(_request: Any, page: Any) -> dict[str, Any]:
    return {"experiments": [experiment_document(each) for each in page.items], **next_page(page)}


ROUTES = [
    MlflowRoute(
        "POST",
        f"{API}/experiments/create",
        "experiments.create",
        CreateExperiment,
        lambda request: {"name": request.name, "tags": pairs(request.tags, "tags")},
        lambda _, found: {"experiment_id": found.id},
    ),
    MlflowRoute("GET", f"{API}/experiments/get", "experiments.show", ExperimentId, _named, _shown),
    MlflowRoute(
        "GET",
        f"{API}/experiments/get-by-name",
        "experiments.find",
        ExperimentByName,
        lambda request: {"name": request.experiment_name},
        _shown,
    ),
    MlflowRoute("POST", f"{API}/experiments/search", "experiments.list", SearchExperiments, _search, _found),
    MlflowRoute(
        "GET",
        f"{API}/experiments/search",
        "experiments.list",
        SearchExperiments,
        _search,
        _found,
        frozenset({"order_by"}),
    ),
    MlflowRoute("POST", f"{API}/experiments/delete", "experiments.delete", ExperimentId, _named),
    MlflowRoute("POST", f"{API}/experiments/restore", "experiments.restore", ExperimentId, _named),
    MlflowRoute(
        "POST",
        f"{API}/experiments/update",
        "experiments.rename",
        UpdateExperiment,
        lambda request: {"experiment": experiment_ref(request.experiment_id), "name": request.new_name},
    ),
    MlflowRoute(
        "POST",
        f"{API}/experiments/set-experiment-tag",
        "experiments.set_tags",
        ExperimentTag,
        lambda request: {
            "experiment": experiment_ref(request.experiment_id),
            "tags": {request.key: request.value},
        },
    ),
    MlflowRoute(
        "POST",
        f"{API}/experiments/delete-experiment-tag",
        "experiments.delete_tags",
        ExperimentTag,
        lambda request: {"experiment": experiment_ref(request.experiment_id), "keys": (request.key,)},
    ),
]
