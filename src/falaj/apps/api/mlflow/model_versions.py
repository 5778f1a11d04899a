"""Routes of model versions: registered from what was logged, searched, tagged, and their files, which are verified."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import msgspec

from falaj.apps.api.mlflow.artifacts import PROXY, OwnedFile
from falaj.apps.api.mlflow.errors import out_of_scope
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
from falaj.errors import InvalidInput
from falaj.records.registry import ModelVersion

VERSIONS = f"{API}/model-versions"
PROMPT_TAG = "mlflow.prompt.is_prompt"
STAGES = {"production": "Production", "staging": "Staging"}
"""Stages of MLflow by the alias that stands for each; a version without one is in the stage None."""
SOURCES = (
    (re.compile(r"mlflow-artifacts:(?://[^/]*)?/runs/([^/]+)/artifacts(?:/(.*))?"), "{0}"),
    (re.compile(r"mlflow-artifacts:(?://[^/]*)?/models/([^/]+)/artifacts(?:/(.*))?"), "{0}"),
    (re.compile(r"mlflow-artifacts:(?://[^/]*)?/versions/([^/]+)/artifacts(?:/(.*))?"), "{0}"),
    (re.compile(r"runs:/([^/]+)/(.+)"), "{0}"),
    (re.compile(r"models:/([^/@]+)/([0-9]+)"), "model_version:{0}@{1}"),
    (re.compile(r"models:/([^/@]+@[^/]+)"), "model_version:{0}"),
    (re.compile(r"models:/([^/@]+)"), "{0}"),
)
"""The addresses that a version can be made of, and what each refers to; a second group is a folder."""
ALLOWED_SOURCES = (
    "files that this server keeps: runs:/RUN/FOLDER, models:/LOGGED-MODEL, models:/NAME/NUMBER, or an artifact_uri "
    "of a run"
)


class NamedModel(msgspec.Struct):
    name: str


class NamedVersion(NamedModel):
    version: str | int

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"


class MovedAlias(NamedVersion):
    alias: str


class CreateVersion(NamedModel):
    source: str
    run_id: str = ""
    tags: list[KeyValue] = []
    description: str = ""
    model_id: str = ""


class UpdateVersion(NamedVersion):
    description: str = ""


class VersionTag(NamedVersion):
    key: str
    value: str = ""


class StagedVersion(NamedVersion):
    stage: str


class SearchVersions(msgspec.Struct):
    filter: str = ""
    max_results: int | None = None
    order_by: list[str] = []
    page_token: str = ""


class VersionFolder(msgspec.Struct):
    owner: str
    folder: str = ""


# ------------------------------------------------------------------------------------------- documents


def version_document(found: ModelVersion) -> dict[str, Any]:
    logged = next((source for source in found.sources if source.startswith("logged_")), None)
    return {
        "name": found.name,
        "version": str(found.number),
        "creation_timestamp": millis(found.created_at),
        "last_updated_timestamp": millis_of(found.updated_at, found.created_at),
        "user_id": found.author,
        "current_stage": next((STAGES[each] for each in STAGES if each in found.aliases), "None"),
        "description": found.description or found.card,
        "source": version_uri(found),
        "status": "READY",
        "tags": key_values(found.tags),
        "aliases": list(found.aliases),
        **({"run_id": found.run} if found.run else {}),
        **({"model_id": logged} if logged else {}),
    }


def version_uri(found: ModelVersion) -> str:
    return f"mlflow-artifacts:/versions/{found.name}@{found.number}/artifacts"


def millis_of(updated: datetime | None, created: datetime) -> int:
    return millis(updated or created)


def shown_version(_request: Any, found: ModelVersion) -> dict[str, Any]:
    return {"model_version": version_document(found)}


def _files(request: VersionFolder, found: ModelVersion) -> dict[str, Any]:
    """Return the files and folders directly in a folder of a version."""
    begin, entries = f"{request.folder}/" if request.folder else "", dict[str, dict[str, Any]]()
    for file in found.files:
        if file.path.startswith(begin):
            name, slash, _ = file.path.removeprefix(begin).partition("/")
            is_folder = bool(slash)
            entries[name] = {"path": name, "is_dir": is_folder}
            entries[name] |= {} if is_folder else {"file_size": file.size_bytes}
    return {"files": [entries[name] for name in sorted(entries)]}


# -------------------------------------------------------------------------------------------- requests


def source_of(text: str) -> tuple[str, str]:
    """Return the object that an address of MLflow's stands for, and the folder in it."""
    for pattern, reference in SOURCES:
        if (match := pattern.fullmatch(text)) is not None:
            groups = [group or "" for group in match.groups()]
            inside = groups[1] if len(groups) > 1 and "{1}" not in reference else ""
            return reference.format(*groups), inside.strip("/")
    raise InvalidInput.at("source", given=text, allowed=ALLOWED_SOURCES)


def refuse_prompts(tags: dict[str, str]) -> None:
    """Raise InvalidInput for a prompt, which clients of MLflow 3 keep as a model with a tag."""
    if tags.get(PROMPT_TAG) == "true":
        raise out_of_scope("the registry of prompts")


def _create(request: CreateVersion) -> dict[str, Any]:
    tags = pairs(request.tags, "tags")
    refuse_prompts(tags)
    source, folder = source_of(request.source)
    return {
        "name": request.name,
        "source": source,
        "folder": folder,
        "run": request.run_id or None,
        "tags": tags,
        "description": request.description,
    }


def _named(request: NamedVersion) -> dict[str, Any]:
    return {"model": request.reference}


def _search(request: SearchVersions) -> dict[str, Any]:
    return {
        "where": request.filter,
        "order_by": request.order_by,
        "after": request.page_token,
        "limit": page_size(request.max_results, 100),
    }


def _to_stage(request: StagedVersion) -> dict[str, Any]:
    alias = request.stage.lower()
    if alias not in STAGES:
        raise InvalidInput.at(
            "stage",
            given=request.stage,
            allowed="Staging or Production, which are the aliases staging and production",
            fix=f"delete_registered_model_alias({request.name!r}, 'production') takes a version out of its stage",
        )
    return {"model": request.reference, "to": alias}


def _in_stage(request: StagedVersion, _moved: Any) -> dict[str, Any]:
    stage = STAGES[request.stage.lower()]
    document = {"name": request.name, "version": str(request.version), "current_stage": stage}
    return {"model_version": document | {"status": "READY"}}


LISTING = MlflowRoute(
    "GET", PROXY, "models.version", VersionFolder, lambda request: {"model": request.owner}, _files
)
ROUTES = [
    MlflowRoute(
        "POST", f"{VERSIONS}/create", "models.register_artifacts", CreateVersion, _create, shown_version
    ),
    MlflowRoute("GET", f"{VERSIONS}/get", "models.version", NamedVersion, _named, shown_version),
    MlflowRoute(
        "PATCH",
        f"{VERSIONS}/update",
        "modelversions.update",
        UpdateVersion,
        lambda request: {"version": request.reference, "description": request.description},
        shown_version,
    ),
    MlflowRoute(
        "POST",
        f"{VERSIONS}/transition-stage",
        "models.promote",
        StagedVersion,
        _to_stage,
        _in_stage,
    ),
    MlflowRoute(
        "GET",
        f"{VERSIONS}/get-download-uri",
        "models.version",
        NamedVersion,
        _named,
        lambda _, found: {"artifact_uri": version_uri(found)},
    ),
    MlflowRoute(
        "GET",
        f"{VERSIONS}/search",
        "modelversions.list",
        SearchVersions,
        _search,
        lambda _, page: {
            "model_versions": [version_document(each) for each in page.items],
            **next_page(page),
        },
        frozenset({"order_by"}),
    ),
    MlflowRoute(
        "POST",
        f"{VERSIONS}/set-tag",
        "modelversions.set_tags",
        VersionTag,
        lambda request: {"version": request.reference, "tags": {request.key: request.value}},
    ),
    MlflowRoute(
        "DELETE",
        f"{VERSIONS}/delete-tag",
        "modelversions.delete_tags",
        VersionTag,
        lambda request: {"version": request.reference, "keys": (request.key,)},
    ),
    MlflowRoute(
        "GET",
        f"{PROXY}/versions/{{owner}}/artifacts/{{path:path}}",
        "models.read",
        OwnedFile,
        lambda request: {"model": request.owner, "file": request.path},
    ),
]
