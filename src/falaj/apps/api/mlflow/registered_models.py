"""Routes of registered models: created, described, tagged, searched, and their aliases."""

from __future__ import annotations

from typing import Any

import msgspec

from falaj.apps.api.mlflow.model_versions import (
    STAGES,
    MovedAlias,
    NamedModel,
    millis_of,
    refuse_prompts,
    shown_version,
    version_document,
)
from falaj.apps.api.mlflow.route import (
    API,
    KeyValue,
    MlflowRoute,
    key_values,
    millis,
    next_page,
    page_size,
    pairs,
)
from falaj.records.registry import Model

MODELS = f"{API}/registered-models"


class CreateModel(NamedModel):
    tags: list[KeyValue] = []
    description: str = ""


class RenameModel(NamedModel):
    new_name: str = ""


class UpdateModel(NamedModel):
    description: str = ""


class ModelTag(NamedModel):
    key: str
    value: str = ""


class ModelAlias(NamedModel):
    alias: str


class LatestVersions(NamedModel):
    stages: list[str] = []


class SearchModels(msgspec.Struct):
    filter: str = ""
    max_results: int | None = None
    order_by: list[str] = []
    page_token: str = ""


def model_document(found: Model) -> dict[str, Any]:
    return {
        "name": found.name,
        "creation_timestamp": millis(found.created_at),
        "last_updated_timestamp": millis_of(found.updated_at, found.created_at),
        "description": found.description,
        "tags": key_values(found.tags),
        **({"latest_versions": [_newest(found)]} if found.versions else {}),
        "aliases": [
            {"alias": each.alias, "version": each.version.rpartition("@")[2]}
            for each in found.aliases
            if each.version
        ],
    }


def _newest(found: Model) -> dict[str, Any]:
    """Return what is known of the newest version without reading it."""
    number = str(found.versions)
    pointing = {each.alias for each in found.aliases if each.version == f"{found.name}@{number}"}
    stage = next((STAGES[alias] for alias in STAGES if alias in pointing), "None")
    return {"name": found.name, "version": number, "current_stage": stage, "status": "READY"}


def _shown(_request: Any, found: Model) -> dict[str, Any]:
    return {"registered_model": model_document(found)}


def _named(request: NamedModel) -> dict[str, Any]:
    return {"model": request.name}


def _create(request: CreateModel) -> dict[str, Any]:
    tags = pairs(request.tags, "tags")
    refuse_prompts(tags)
    return {"name": request.name, "tags": tags, "description": request.description}


def _list(request: SearchModels) -> dict[str, Any]:
    return {
        "where": request.filter,
        "order_by": request.order_by,
        "after": request.page_token,
        "limit": page_size(request.max_results, 100),
    }


def _latest(request: LatestVersions, page: Any) -> dict[str, Any]:
    """Return the newest version of each stage that is asked for; of all stages without any."""
    wanted = {stage.lower() for stage in request.stages} or {"none", *STAGES}
    found: dict[str, dict[str, Any]] = {}
    for version in page.items:
        document = version_document(version)
        found.setdefault(document["current_stage"].lower(), document)
    return {"model_versions": [document for stage, document in found.items() if stage in wanted]}


ROUTES = [
    MlflowRoute("POST", f"{MODELS}/create", "models.create", CreateModel, _create, _shown),
    MlflowRoute("GET", f"{MODELS}/get", "models.show", NamedModel, _named, _shown),
    MlflowRoute(
        "PATCH",
        f"{MODELS}/update",
        "models.update",
        UpdateModel,
        lambda request: {"model": request.name, "description": request.description},
        _shown,
    ),
    MlflowRoute(
        "POST",
        f"{MODELS}/rename",
        "models.rename",
        RenameModel,
        lambda request: {"model": request.name, "name": request.new_name},
        _shown,
    ),
    MlflowRoute("DELETE", f"{MODELS}/delete", "models.delete", NamedModel, _named),
    MlflowRoute(
        "GET",
        f"{MODELS}/search",
        "models.list",
        SearchModels,
        _list,
        lambda _, page: {
            "registered_models": [model_document(each) for each in page.items],
            **next_page(page),
        },
        frozenset({"order_by"}),
    ),
    *(
        MlflowRoute(
            method,
            f"{MODELS}/get-latest-versions",
            "models.latest",
            LatestVersions,
            lambda request: {"model": request.name, "aliases": tuple(STAGES)},
            _latest,
            frozenset({"stages"}),
        )
        for method in ("GET", "POST")
    ),
    MlflowRoute(
        "POST",
        f"{MODELS}/set-tag",
        "models.set_tags",
        ModelTag,
        lambda request: {"model": request.name, "tags": {request.key: request.value}},
    ),
    MlflowRoute(
        "DELETE",
        f"{MODELS}/delete-tag",
        "models.delete_tags",
        ModelTag,
        lambda request: {"model": request.name, "keys": (request.key,)},
    ),
    MlflowRoute(
        "GET",
        f"{MODELS}/alias",
        "models.resolve",
        ModelAlias,
        lambda request: {"model": request.name, "alias": request.alias},
        shown_version,
    ),
    MlflowRoute(
        "POST",
        f"{MODELS}/alias",
        "models.promote",
        MovedAlias,
        lambda request: {"model": request.reference, "to": request.alias},
    ),
    MlflowRoute(
        "DELETE",
        f"{MODELS}/alias",
        "models.remove_alias",
        ModelAlias,
        lambda request: {"model": request.name, "alias": request.alias},
    ),
]
