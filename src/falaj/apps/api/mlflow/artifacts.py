"""Routes of the proxy of artifacts: files of runs and of logged models, listed, read, stored and deleted."""

from __future__ import annotations

from typing import Any

import msgspec

from falaj.apps.api.mlflow.route import API, MlflowRoute, next_page
from falaj.apps.api.mlflow.runs import RunId

PROXY = "/api/2.0/mlflow-artifacts/artifacts"


class OwnedFile(msgspec.Struct):
    owner: str
    path: str


class ListedFolder(msgspec.Struct):
    owner: str
    folder: str = ""


class ListRunArtifacts(RunId):
    path: str = ""
    page_token: str = ""


def _entries(page: Any, *, relative_to: str) -> list[dict[str, Any]]:
    begin = f"{relative_to}/" if relative_to else ""
    return [
        {
            "path": each.path.removeprefix(begin),
            "is_dir": each.is_folder,
            **({} if each.is_folder else {"file_size": each.size_bytes}),
            **({"unsafe": True} if each.unsafe else {}),
        }
        for each in page.items
    ]


def _folder(request: ListedFolder, page: Any) -> dict[str, Any]:
    return {"files": _entries(page, relative_to=request.folder)}


def _of_owner(kind: str, group: str, parameter: str) -> list[MlflowRoute]:
    """Return the routes of the files of one kind of object, whose group of operations is `group`."""
    path = f"{PROXY}/{kind}/{{owner}}/artifacts/{{path:path}}"

    def named(request: OwnedFile) -> dict[str, Any]:
        return {parameter: request.owner, "path": request.path}

    return [
        MlflowRoute("GET", path, f"{group}.read_artifact", OwnedFile, named),
        MlflowRoute("PUT", path, f"{group}.upload_artifact", OwnedFile, named),
        MlflowRoute("DELETE", path, f"{group}.delete_artifact", OwnedFile, named),
    ]


def _listing(group: str, parameter: str) -> MlflowRoute:
    def named(request: ListedFolder) -> dict[str, Any]:
        return {parameter: request.owner, "folder": request.folder}

    return MlflowRoute("GET", PROXY, f"{group}.artifacts", ListedFolder, named, _folder)


LISTINGS = {"runs": _listing("runs", "run"), "models": _listing("loggedmodels", "model")}

ROUTES = [
    *_of_owner("runs", "runs", "run"),
    *_of_owner("models", "loggedmodels", "model"),
    MlflowRoute(
        "GET",
        f"{API}/artifacts/list",
        "runs.artifacts",
        ListRunArtifacts,
        lambda request: {"run": request.run, "folder": request.path, "after": request.page_token},
        lambda request, page: {
            "root_uri": f"mlflow-artifacts:/runs/{request.run}/artifacts",
            "files": _entries(page, relative_to=""),
            **next_page(page),
        },
    ),
]
