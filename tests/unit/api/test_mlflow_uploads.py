"""Uploads in parts over MLflow's REST API: one file once they are complete, and nothing before."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import httpx
import pytest

from falaj.tracking.tables import upload_parts, uploads
from interfaces import ServedPlatform

API = "/api/2.0/mlflow"
FILES = "/api/2.0/mlflow-artifacts/artifacts"
MPU = "/api/2.0/mlflow-artifacts/mpu"


@pytest.fixture
def run(served: ServedPlatform) -> str:
    created = served.as_admin.post(f"{API}/runs/create", json={"experiment_id": "0"}).json()
    return str(created["run"]["info"]["run_id"])


def start(served: ServedPlatform, run: str, *, parts: int = 2, folder: str = "/model") -> dict[str, Any]:
    body = {"path": "/home/dana/big.bin", "num_parts": parts}
    response = served.as_admin.post(f"{MPU}/create/runs/{run}/artifacts{folder}", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def send(credential: dict[str, Any], content: bytes) -> dict[str, Any]:
    """Send a part as clients do: with the headers that the server named, and no others."""
    response = httpx.put(credential["url"], content=content, headers=credential["headers"])
    assert response.status_code == 200, response.text
    return {
        "part_number": credential["part_number"],
        "etag": response.headers["ETag"],
        "url": credential["url"],
    }


def finish(served: ServedPlatform, run: str, what: str, **body: Any) -> httpx.Response:
    return served.as_admin.post(f"{MPU}/{what}/runs/{run}/artifacts/model", json={"path": "big.bin", **body})


def listed(served: ServedPlatform, run: str) -> list[str]:
    found = served.as_admin.get(FILES, params={"path": f"runs/{run}/artifacts/model"}).json()["files"]
    return [each["path"] for each in found]


def left_over(served: ServedPlatform) -> list[int]:
    with served.parts.database.read() as tx:
        return [len(tx.execute(table.select()).all()) for table in (uploads, upload_parts)]


def test_parts_become_one_file_in_the_order_of_their_numbers(served: ServedPlatform, run: str) -> None:
    started = start(served, run)
    contents = [b"a" * 3_000_000, b"b" * 1000]
    sent = [
        send(credential, content)
        for credential, content in reversed([*zip(started["credentials"], contents, strict=True)])
    ]

    before = listed(served, run)
    done = finish(served, run, "complete", upload_id=started["upload_id"], parts=sent)
    read = served.as_admin.get(f"{FILES}/runs/{run}/artifacts/model/big.bin")

    assert (before, done.status_code, listed(served, run)) == ([], 200, ["big.bin"])
    assert read.content == b"".join(contents)
    assert left_over(served) == [0, 0]
    again = finish(served, run, "complete", upload_id=started["upload_id"], parts=sent)
    assert (again.status_code, again.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")


def test_an_upload_that_is_aborted_leaves_nothing(served: ServedPlatform, run: str) -> None:
    started = start(served, run)
    send(started["credentials"][0], b"a")

    aborted = finish(served, run, "abort", upload_id=started["upload_id"])

    assert aborted.status_code == 200
    assert (listed(served, run), left_over(served)) == ([], [0, 0])


@pytest.mark.parametrize("wrong", ["missing", "hash", "twice", "gap", "none"])
def test_parts_that_do_not_fit_are_refused(served: ServedPlatform, run: str, wrong: str) -> None:
    started = start(served, run, parts=3)
    first, second, third = started["credentials"]
    sent = [send(first, b"a"), send(third if wrong == "gap" else second, b"b")]
    given = {
        "missing": sent[:1],
        "hash": [sent[0], sent[1] | {"etag": "0" * 64}],
        "twice": [*sent, sent[1]],
        "gap": sent,
        "none": [],
    }[wrong]

    refused = finish(served, run, "complete", upload_id=started["upload_id"], parts=given)

    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert listed(served, run) == []
    finish(served, run, "abort", upload_id=started["upload_id"])


def test_a_part_that_is_cut_off_or_sent_by_another_is_not_kept(served: ServedPlatform, run: str) -> None:
    started = start(served, run, parts=1)
    (credential,) = started["credentials"]
    host, port = served.url.removeprefix("http://").split(":")
    head = (
        f"PUT {credential['url'].removeprefix(served.url)} HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {served.admin}\r\nContent-Length: 1000000\r\n\r\n"
    )

    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"x" * 500_000)
    nobody = httpx.put(credential["url"], content=b"x")
    stranger = httpx.put(
        credential["url"], content=b"x", headers={"Authorization": f"Bearer {served.stranger}"}
    )
    finish(served, run, "abort", upload_id=started["upload_id"])

    assert nobody.status_code == 401
    assert stranger.status_code in (403, 404)
    assert left_over(served) == [0, 0]


@pytest.mark.parametrize(
    ("folder", "body"),
    [
        ("/%2e%2e/x", {"path": "a", "num_parts": 1}),
        ("", {"path": "..", "num_parts": 1}),
        ("", {"path": "", "num_parts": 1}),
        ("", {"path": "a", "num_parts": 0}),
        ("", {"path": "a", "num_parts": 10_001}),
        ("", {"path": "a", "num_parts": "many"}),
        ("", {}),
    ],
)
def test_an_upload_that_cannot_be_is_refused(
    served: ServedPlatform, run: str, folder: str, body: dict[str, Any]
) -> None:
    refused = served.as_admin.post(f"{MPU}/create/runs/{run}/artifacts{folder}", json=body)

    assert refused.status_code in (400, 404)
    assert left_over(served) == [0, 0]


def test_uploads_that_nobody_completes_expire(served: ServedPlatform, run: str) -> None:
    started = start(served, run, folder="")
    send(started["credentials"][0], b"a")

    served.clock.advance(timedelta(days=2))
    removed = served.platform.runs.cleanup()

    assert removed.uploads == 1
    assert left_over(served) == [0, 0]
