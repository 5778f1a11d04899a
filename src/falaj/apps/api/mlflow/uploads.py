"""Routes of uploads in parts, as clients do with MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request

from falaj.apps.api.mlflow.route import MlflowRoute
from falaj.errors import InvalidInput
from falaj.records.tracking import Upload

MPU = "/api/2.0/mlflow-artifacts/mpu"
MOST_PARTS = 10_000


class StartUpload(msgspec.Struct):
    owner: str
    path: str
    folder: str = ""
    num_parts: int = 1
    address: str = ""
    authorization: str = ""


class SentPart(msgspec.Struct):
    upload: str
    number: int


class NamedPart(msgspec.Struct):
    part_number: int
    etag: str


class CompleteUpload(msgspec.Struct):
    owner: str
    upload_id: str
    folder: str = ""
    parts: list[NamedPart] = []


class AbortUpload(msgspec.Struct):
    owner: str
    upload_id: str
    folder: str = ""


def _start(request: StartUpload) -> dict[str, Any]:
    if not 1 <= request.num_parts <= MOST_PARTS:
        raise InvalidInput.at("num_parts", given=request.num_parts, allowed=f"1 to {MOST_PARTS}")
    name = re.split(r"[/\\]", request.path)[-1]  # clients send the whole path of their file
    return {"owner": request.owner, "path": "/".join(filter(None, (request.folder.strip("/"), name)))}


def _credentials(request: StartUpload, started: Upload) -> dict[str, Any]:
    """Return where to send each part, with the header that authorized this request: clients send no other there."""
    headers = {"Authorization": request.authorization} if request.authorization else {}
    return {
        "upload_id": started.id,
        "credentials": [
            {
                "url": f"{request.address}{MPU}/parts/{started.id}/{number}",
                "part_number": number,
                "headers": headers,
            }
            for number in range(1, request.num_parts + 1)
        ],
    }


def _caller(request: Request) -> dict[str, str]:
    return {
        "address": str(request.base_url).rstrip("/"),
        "authorization": request.headers.get("authorization", ""),
    }


def _complete(request: CompleteUpload) -> dict[str, Any]:
    parts = [{"number": each.part_number, "sha256": each.etag.strip('"')} for each in request.parts]
    return {"upload": request.upload_id, "parts": parts}


def _of_owner(kind: str) -> list[MlflowRoute]:
    """Return the routes for the files of one kind of object."""
    place = f"{kind}/{{owner}}/artifacts{{folder:path}}"
    return [
        MlflowRoute(
            "POST",
            f"{MPU}/create/{place}",
            "uploads.start",
            StartUpload,
            _start,
            _credentials,
            context=_caller,
        ),
        MlflowRoute("POST", f"{MPU}/complete/{place}", "uploads.complete", CompleteUpload, _complete),
        MlflowRoute(
            "POST",
            f"{MPU}/abort/{place}",
            "uploads.abort",
            AbortUpload,
            lambda request: {"upload": request.upload_id},
        ),
    ]


ROUTES = [
    *_of_owner("runs"),
    *_of_owner("models"),
    MlflowRoute(
        "PUT",
        f"{MPU}/parts/{{upload}}/{{number}}",
        "uploads.send_part",
        SentPart,
        lambda request: {"upload": request.upload, "number": request.number},
        headers=lambda sent: {"ETag": f'"{sent.sha256}"'},
    ),
]
