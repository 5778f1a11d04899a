"""MLflow's REST API over plain HTTP: documents and errors as its clients read them, and one operation for each."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from falaj.apps.api.mlflow.routes import LISTINGS, ROUTES
from falaj.control.services import all_operations
from falaj.governance.tables import blobs as blobs_table
from interfaces import ServedPlatform
from model_files import onnx

API = "/api/2.0/mlflow"
FILES = "/api/2.0/mlflow-artifacts/artifacts"


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(f"{API}/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    response = client.get(f"{API}/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error_code"]


@pytest.fixture
def run(served: ServedPlatform) -> str:
    created = post(served.as_admin, "runs/create", experiment_id="0", start_time=1_700_000_000_000)
    return str(created["run"]["info"]["run_id"])


def test_every_route_performs_one_known_operation() -> None:
    routes = [*ROUTES, *LISTINGS.values()]

    assert {route.operation for route in routes} <= all_operations().keys()
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert not any(all_operations()[route.operation].internal for route in routes)


def test_experiments_are_made_found_renamed_tagged_and_deleted(served: ServedPlatform) -> None:
    client = served.as_admin
    ident = post(client, "experiments/create", name="a/b: c", tags=[{"key": "team", "value": "risk"}])[
        "experiment_id"
    ]

    found = get(client, "experiments/get-by-name", experiment_name="a/b: c")["experiment"]
    post(client, "experiments/set-experiment-tag", experiment_id=ident, key="k", value="v")
    post(client, "experiments/update", experiment_id=ident, new_name="other")
    post(client, "experiments/delete", experiment_id=ident)
    deleted = post(client, "experiments/search", view_type="DELETED_ONLY", max_results=10)["experiments"]
    post(client, "experiments/restore", experiment_id=ident)
    shown = get(client, "experiments/get", experiment_id=ident)["experiment"]

    assert found["experiment_id"] == ident
    assert found["lifecycle_stage"] == "active"
    assert [each["name"] for each in deleted] == ["other"]
    assert shown["tags"] == [{"key": "k", "value": "v"}, {"key": "team", "value": "risk"}]


def test_an_experiment_that_exists_is_refused_with_the_code_of_mlflow(served: ServedPlatform) -> None:
    post(served.as_admin, "experiments/create", name="twice")

    again = served.as_admin.post(f"{API}/experiments/create", json={"name": "twice"})

    assert refusal(again) == (400, "RESOURCE_ALREADY_EXISTS")


def test_what_is_logged_is_shown(served: ServedPlatform, run: str) -> None:
    client = served.as_admin
    post(client, "runs/log-metric", run_id=run, key="auc", value=0.5, timestamp=1_700_000_000_123, step=2)
    post(client, "runs/log-parameter", run_id=run, key="lr", value="0.1")
    post(client, "runs/set-tag", run_id=run, key="team", value="risk")
    post(
        client,
        "runs/log-batch",
        run_id=run,
        metrics=[{"key": "loss", "value": "NaN", "timestamp": "1700000000000", "step": "1"}],
        params=[{"key": "depth", "value": "3"}],
        tags=[{"key": "n", "value": "1"}],
    )
    dataset = {"name": "d", "digest": "x", "source_type": "local", "source": "{}"}
    tag = {"key": "mlflow.data.context", "value": "training"}
    post(client, "runs/log-inputs", run_id=run, datasets=[{"dataset": dataset, "tags": [tag]}])
    post(client, "runs/update", run_id=run, status="FINISHED", end_time=1_700_000_001_000, run_name="best")

    shown = get(client, "runs/get", run_id=run)["run"]

    assert shown["info"]["status"] == "FINISHED"
    assert (shown["info"]["start_time"], shown["info"]["end_time"]) == (1_700_000_000_000, 1_700_000_001_000)
    metrics = {
        each["key"]: (each["value"], each["timestamp"], each["step"]) for each in shown["data"]["metrics"]
    }
    assert metrics == {"auc": (0.5, 1_700_000_000_123, 2), "loss": ("NaN", 1_700_000_000_000, 1)}
    assert {each["key"]: each["value"] for each in shown["data"]["params"]} == {"lr": "0.1", "depth": "3"}
    tags = {each["key"]: each["value"] for each in shown["data"]["tags"]}
    assert tags == {"mlflow.runName": "best", "team": "risk", "n": "1"}
    assert shown["inputs"]["dataset_inputs"] == [{"dataset": dataset, "tags": [tag]}]


def test_histories_come_in_pages_and_for_several_runs(served: ServedPlatform, run: str) -> None:
    client = served.as_admin
    points = [
        {"key": "m", "value": step, "timestamp": 1_700_000_000_000 + step, "step": step} for step in range(5)
    ]
    post(client, "runs/log-batch", run_id=run, metrics=points)

    first = get(client, "metrics/get-history", run_id=run, metric_key="m", max_results=3)
    rest = get(
        client,
        "metrics/get-history",
        run_id=run,
        metric_key="m",
        max_results=3,
        page_token=first["next_page_token"],
    )
    bulk = get(client, "metrics/get-history-bulk-interval", run_ids=[run], metric_key="m", max_results=10)

    assert [each["step"] for each in first["metrics"] + rest["metrics"]] == [0, 1, 2, 3, 4]
    assert "next_page_token" not in rest
    assert [(each["run_id"], each["value"]) for each in bulk["metrics"]] == [(run, step) for step in range(5)]


def test_runs_are_searched_by_metric_in_order_and_pages(served: ServedPlatform) -> None:
    client = served.as_admin
    ident = post(client, "experiments/create", name="searched")["experiment_id"]
    for number in range(5):
        run = post(client, "runs/create", experiment_id=ident)["run"]["info"]["run_id"]
        post(client, "runs/log-metric", run_id=run, key="auc", value=number / 10, timestamp=1)
    query = {"experiment_ids": [ident], "filter": "metrics.auc > 0.1", "order_by": ["metrics.auc DESC"]}

    first = post(client, "runs/search", **query, max_results=2)
    rest = post(client, "runs/search", **query, max_results=2, page_token=first["next_page_token"])

    values = [run["data"]["metrics"][0]["value"] for run in first["runs"] + rest["runs"]]
    assert values == [0.4, 0.3, 0.2]


def test_artifacts_are_stored_listed_read_and_deleted(served: ServedPlatform, run: str) -> None:
    client, root = served.as_admin, f"{FILES}/runs/{run}/artifacts"
    content = bytes(range(256)) * 5000

    stored = client.put(f"{root}/model/model.pkl", content=content)
    client.put(f"{root}/note.txt", content=b"").raise_for_status()
    top = client.get(FILES, params={"path": f"runs/{run}/artifacts"}).json()["files"]
    inner = client.get(FILES, params={"path": f"runs/{run}/artifacts/model"}).json()["files"]
    read = client.get(f"{root}/model/model.pkl")
    deleted = client.delete(f"{root}/model")

    assert (stored.status_code, stored.json()) == (200, {})
    assert top == [{"path": "model", "is_dir": True}, {"path": "note.txt", "is_dir": False, "file_size": 0}]
    assert inner == [{"path": "model.pkl", "is_dir": False, "file_size": len(content), "unsafe": True}]
    assert read.content == content
    assert deleted.status_code == 200
    assert client.get(f"{root}/model/model.pkl").status_code == 404


@pytest.mark.parametrize("path", ["%2e%2e/secret", "a/%2e%2e/%2e%2e/b", "a%5cb", "a//b", "a%00b"])
def test_a_path_that_leaves_the_artifacts_is_refused(served: ServedPlatform, run: str, path: str) -> None:
    refused = served.as_admin.put(f"{FILES}/runs/{run}/artifacts/{path}", content=b"x")

    assert refused.status_code in (400, 404)
    assert refused.json()["error_code"] in ("INVALID_PARAMETER_VALUE", "ENDPOINT_NOT_FOUND")
    assert get(served.as_admin, "artifacts/list", run_id=run)["files"] == []


def test_logged_models_are_made_finalized_measured_and_found(served: ServedPlatform, run: str) -> None:
    client = served.as_admin
    experiment = get(client, "runs/get", run_id=run)["run"]["info"]["experiment_id"]
    made = post(client, "logged-models", experiment_id=experiment, name="m", source_run_id=run)["model"]
    ident = made["info"]["model_id"]

    client.patch(f"{API}/logged-models/{ident}", json={"status": "LOGGED_MODEL_READY"}).raise_for_status()
    post(client, "runs/log-metric", run_id=run, key="auc", value=0.9, timestamp=1, model_id=ident)
    post(client, "runs/outputs", run_id=run, models=[{"model_id": ident, "step": 1}])
    shown = get(client, f"logged-models/{ident}")["model"]
    found = post(client, "logged-models/search", experiment_ids=[experiment], filter="metrics.auc > 0.5")

    assert made["info"]["status"] == "LOGGED_MODEL_PENDING"
    assert shown["info"]["status"] == "LOGGED_MODEL_READY"
    assert [each["value"] for each in shown["data"]["metrics"]] == [0.9]
    assert [each["info"]["model_id"] for each in found["models"]] == [ident]
    outputs = get(client, "runs/get", run_id=run)["run"]["outputs"]["model_outputs"]
    assert outputs == [{"model_id": ident, "step": 1}]


def test_versions_are_found_by_alias_and_their_files_are_verified(served: ServedPlatform) -> None:
    client, platform = served.as_admin, served.platform
    blobs = [platform.blobs.upload(iter([data])).id for data in (onnx(), b"flavors: {}\n")]
    platform.models.register("mlf-churn", files=tuple(blobs), paths=("data/model.onnx", "MLmodel"))
    post(client, "registered-models/alias", name="mlf-churn", alias="champion", version="1")

    version = get(client, "registered-models/alias", name="mlf-churn", alias="champion")["model_version"]
    model = get(client, "registered-models/get", name="mlf-churn")["registered_model"]
    uri = get(client, "model-versions/get-download-uri", name="mlf-churn", version="1")["artifact_uri"]
    place = uri.removeprefix("mlflow-artifacts:/")
    top = client.get(FILES, params={"path": place}).json()["files"]
    inner = client.get(FILES, params={"path": f"{place}/data"}).json()["files"]
    found = get(client, "model-versions/search", filter="name='mlf-churn'")["model_versions"]

    assert (version["version"], version["status"]) == ("1", "READY")
    assert model["aliases"] == [{"alias": "champion", "version": "1"}]
    assert [(each["path"], each["is_dir"]) for each in top] == [("MLmodel", False), ("data", True)]
    assert [each["path"] for each in inner] == ["model.onnx"]
    assert client.get(f"{FILES}/{place}/data/model.onnx").content == onnx()
    assert [each["version"] for each in found] == ["1"]


def test_a_version_whose_record_was_changed_is_not_handed_out(served: ServedPlatform) -> None:
    blob = served.platform.blobs.upload(iter([onnx()])).id
    served.platform.models.register("mlf-changed", files=(blob,), paths=("model.onnx",))
    with served.parts.database.write() as tx:
        tx.execute(update(blobs_table).where(blobs_table.c.id == blob).values(sha256="0" * 64))

    refused = served.as_admin.get(f"{FILES}/versions/mlf-changed@1/artifacts/model.onnx")

    assert refusal(refused) == (422, "DATA_LOSS")


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"run_id": 5}',
        b'{"metrics": [{"key": "a"}]}',
        b'{"metrics": [{"key": "a", "value": "many", "timestamp": 1}]}',
        b'{"metrics": [{"key": "a", "value": 1, "timestamp": 99999999999999999}]}',
        b'{"metrics": [{"key": "a", "value": 1, "timestamp": 1, "step": 99999999999999999999}]}',
        b'{"params": [{"key": "a", "value": "1"}, {"key": "a", "value": "2"}]}',
        b'{"params": [{"key": "\\u0000", "value": "1"}]}',
        b'{"tags": [{"key": "a", "value": "' + b"x" * 20_000 + b'"}]}',
        b"[" * 100_000,
    ],
)
def test_a_batch_that_is_wrong_stores_nothing(served: ServedPlatform, run: str, body: bytes) -> None:
    good = b'{"run_id": "' + run.encode() + b'", '
    sent = body.replace(b"{", good, 1) if body.startswith((b'{"metrics', b'{"params', b'{"tags')) else body

    refused = served.as_admin.post(f"{API}/runs/log-batch", content=sent)

    assert refusal(refused) == (400, "INVALID_PARAMETER_VALUE")
    data = get(served.as_admin, "runs/get", run_id=run)["run"]["data"]
    assert (data["metrics"], data["params"], len(data["tags"])) == ([], [], 1)


def test_a_parameter_is_not_changed(served: ServedPlatform, run: str) -> None:
    post(served.as_admin, "runs/log-parameter", run_id=run, key="lr", value="1")

    refused = served.as_admin.post(
        f"{API}/runs/log-parameter", json={"run_id": run, "key": "lr", "value": "2"}
    )

    assert refusal(refused) == (400, "INVALID_PARAMETER_VALUE")


def test_unknown_objects_paths_and_callers_have_the_codes_of_mlflow(served: ServedPlatform, run: str) -> None:
    unknown = served.as_admin.get(f"{API}/runs/get", params={"run_id": "run_" + "0" * 26})
    path = served.as_admin.get(f"{API}/runs/nothing")
    nobody = served.as_nobody.get(f"{API}/runs/get", params={"run_id": run})
    hidden = served.http(served.stranger).get(f"{API}/runs/get", params={"run_id": run})

    assert refusal(unknown) == (404, "RESOURCE_DOES_NOT_EXIST")
    assert refusal(path) == (404, "ENDPOINT_NOT_FOUND")
    assert refusal(nobody) == (401, "UNAUTHENTICATED")
    assert refusal(hidden) in ((404, "RESOURCE_DOES_NOT_EXIST"), (403, "PERMISSION_DENIED"))


def test_a_header_names_the_workspace_and_without_rights_there_nothing_is_made(
    served: ServedPlatform,
) -> None:
    developer = served.http(served.developer)
    body = {"name": "of risk"}

    refused = developer.post(f"{API}/experiments/create", json=body)
    made = developer.post(f"{API}/experiments/create", json=body, headers={"X-MLFLOW-WORKSPACE": "risk"})
    shown = get(developer, "experiments/get", experiment_id=made.json()["experiment_id"])["experiment"]
    written = served.http(served.stranger).post(
        f"{API}/experiments/set-experiment-tag",
        json={"experiment_id": shown["experiment_id"], "key": "k", "value": "v"},
    )

    assert refusal(refused)[1] in ("PERMISSION_DENIED", "RESOURCE_DOES_NOT_EXIST")
    assert shown["name"] == "of risk"
    assert refusal(written)[1] in ("PERMISSION_DENIED", "RESOURCE_DOES_NOT_EXIST")


def test_an_upload_that_is_cut_off_leaves_no_file(served: ServedPlatform, run: str) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = (
        f"PUT {FILES}/runs/{run}/artifacts/cut.bin HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {served.admin}\r\nContent-Length: 1000000\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"x" * 500_000)

    served.as_admin.put(f"{FILES}/runs/{run}/artifacts/whole.bin", content=b"x").raise_for_status()

    files = get(served.as_admin, "artifacts/list", run_id=run)["files"]
    assert [each["path"] for each in files] == ["whole.bin"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/3.0/mlflow/traces",
        "/api/2.0/mlflow/gateway/endpoints/list",
        "/api/3.0/mlflow/prompt-optimization/jobs",
    ],
)
def test_what_is_out_of_scope_says_so(served: ServedPlatform, path: str) -> None:
    answer = served.as_admin.post(path, json={})

    assert refusal(answer) == (501, "NOT_IMPLEMENTED")
    assert answer.json()["message"].endswith("Falaj's interface for it")


def test_a_call_is_audited_as_its_operation(served: ServedPlatform, run: str) -> None:
    post(served.as_admin, "runs/set-tag", run_id=run, key="audited", value="yes")

    entries = served.platform.audit.list(limit=50).items

    assert "runs.set_tags" in {entry.action for entry in entries}
