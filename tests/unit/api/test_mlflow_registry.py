"""The model registry over MLflow's REST API: what its clients send, and the codes that they get."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from falaj.governance.blobs.contents import BlobContents
from interfaces import ServedPlatform
from model_files import xgboost_ubj

API = "/api/2.0/mlflow"
FILES = "/api/2.0/mlflow-artifacts/artifacts"
MODEL = {"MLmodel": b"flavors:\n  xgboost: {}\n  python_function: {}\n", "model.ubj": xgboost_ubj()}


def call(client: httpx.Client, method: str, path: str, **body: Any) -> Any:
    response = client.request(method, f"{API}/{path}", **_sent(method, body))
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: httpx.Client, method: str, path: str, **body: Any) -> tuple[int, str]:
    response = client.request(method, f"{API}/{path}", **_sent(method, body))
    return response.status_code, response.json()["error_code"]


def _sent(method: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"params": body} if method == "GET" else {"json": body}


def logged_run(client: httpx.Client, files: Mapping[str, bytes] = MODEL) -> str:
    run = str(call(client, "POST", "runs/create", experiment_id="0")["run"]["info"]["run_id"])
    for path, content in files.items():
        client.put(f"{FILES}/runs/{run}/artifacts/model/{path}", content=content).raise_for_status()
    return run


def registered(client: httpx.Client, name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    run = logged_run(client)
    version = call(client, "POST", "model-versions/create", name=name, source=f"runs:/{run}/model", **more)
    return run, version["model_version"]


def test_models_are_created_described_tagged_renamed_and_deleted(served: ServedPlatform) -> None:
    client, tag = served.as_admin, [{"key": "team", "value": "risk"}]
    call(client, "POST", "registered-models/create", name="reg-a", tags=tag, description="first")

    call(client, "PATCH", "registered-models/update", name="reg-a", description="second")
    call(client, "POST", "registered-models/set-tag", name="reg-a", key="n", value="1")
    call(client, "DELETE", "registered-models/delete-tag", name="reg-a", key="team")
    call(client, "POST", "registered-models/rename", name="reg-a", new_name="reg-b")
    shown = call(client, "GET", "registered-models/get", name="reg-b")["registered_model"]
    twice = refused(client, "POST", "registered-models/create", name="reg-b")
    missing = refused(client, "DELETE", "registered-models/delete-tag", name="reg-b", key="team")
    call(client, "DELETE", "registered-models/delete", name="reg-b")

    assert (shown["name"], shown["description"]) == ("reg-b", "second")
    assert shown["tags"] == [{"key": "n", "value": "1"}]
    assert shown["last_updated_timestamp"] >= shown["creation_timestamp"]
    assert twice == (400, "RESOURCE_ALREADY_EXISTS")
    assert missing == (404, "RESOURCE_DOES_NOT_EXIST")
    assert refused(client, "GET", "registered-models/get", name="reg-b")[0] == 404


def test_a_version_is_registered_described_and_tagged(served: ServedPlatform) -> None:
    client = served.as_admin
    run, made = registered(client, "reg-v", description="first", tags=[{"key": "a", "value": "b"}])

    call(client, "PATCH", "model-versions/update", name="reg-v", version="1", description="second")
    call(client, "POST", "model-versions/set-tag", name="reg-v", version="1", key="n", value="1")
    call(client, "DELETE", "model-versions/delete-tag", name="reg-v", version="1", key="a")
    shown = call(client, "GET", "model-versions/get", name="reg-v", version="1")["model_version"]

    assert (made["version"], made["status"], made["run_id"]) == ("1", "READY", run)
    assert (made["description"], made["tags"]) == ("first", [{"key": "a", "value": "b"}])
    assert (shown["description"], shown["tags"]) == ("second", [{"key": "n", "value": "1"}])


def test_what_never_changes_says_what_to_do_instead(served: ServedPlatform) -> None:
    client = served.as_admin
    registered(client, "reg-fixed")

    renamed = client.post(f"{API}/registered-models/rename", json={"name": "reg-fixed", "new_name": "x"})
    deleted = client.request("DELETE", f"{API}/registered-models/delete", json={"name": "reg-fixed"})
    version = client.request(
        "DELETE", f"{API}/model-versions/delete", json={"name": "reg-fixed", "version": "1"}
    )

    for response, instead in (
        (renamed, "copy_model_version"),
        (deleted, "set_registered_model_tag"),
        (version, "set_model_version_tag"),
    ):
        assert response.status_code == 400
        assert response.json()["error_code"] in ("INVALID_PARAMETER_VALUE", "INVALID_STATE")
        assert instead in response.json()["message"]
    assert call(client, "GET", "model-versions/get", name="reg-fixed", version="1")


def test_aliases_and_stages_move_and_go(served: ServedPlatform) -> None:
    client = served.as_admin
    for _ in range(2):
        registered(client, "reg-alias")
    call(client, "POST", "registered-models/alias", name="reg-alias", alias="champion", version="1")

    moved = call(
        client, "POST", "model-versions/transition-stage", name="reg-alias", version="1", stage="Production"
    )
    latest = call(client, "POST", "registered-models/get-latest-versions", name="reg-alias")["model_versions"]
    staged = call(
        client, "GET", "registered-models/get-latest-versions", name="reg-alias", stages="Production"
    )["model_versions"]
    archived = refused(
        client, "POST", "model-versions/transition-stage", name="reg-alias", version="1", stage="Archived"
    )
    call(client, "DELETE", "registered-models/alias", name="reg-alias", alias="champion")
    gone = refused(client, "GET", "registered-models/alias", name="reg-alias", alias="champion")
    again = refused(client, "DELETE", "registered-models/alias", name="reg-alias", alias="champion")
    call(client, "POST", "registered-models/alias", name="reg-alias", alias="champion", version="2")
    back = call(client, "GET", "registered-models/alias", name="reg-alias", alias="champion")["model_version"]

    model = call(client, "GET", "registered-models/get", name="reg-alias")["registered_model"]
    assert [each["version"] for each in model["latest_versions"]] == ["2"]
    assert moved["model_version"]["current_stage"] == "Production"
    assert [(each["version"], each["current_stage"]) for each in latest] == [
        ("2", "None"),
        ("1", "Production"),
    ]
    assert [each["version"] for each in staged] == ["1"]
    assert archived == (400, "INVALID_PARAMETER_VALUE")
    assert gone == again == (404, "RESOURCE_DOES_NOT_EXIST")
    assert (back["version"], back["aliases"]) == ("2", ["champion"])


def test_a_protected_alias_is_not_removed(served: ServedPlatform) -> None:
    registered(served.as_admin, "reg-protected")
    served.platform.models.promote("reg-protected@1", to="champion")
    served.platform.models.protect("reg-protected", alias="champion")

    refusal = refused(
        served.as_admin, "DELETE", "registered-models/alias", name="reg-protected", alias="champion"
    )

    assert refusal == (400, "INVALID_PARAMETER_VALUE")


@pytest.fixture(scope="module")
def searched(served_on_each: ServedPlatform) -> tuple[httpx.Client, dict[str, str]]:
    """Models s-a to s-c with tags, and versions of s-a and s-b, by the run of each."""
    client, runs = served_on_each.as_admin, {}
    for name, team in (("s-a", "risk"), ("s-b", "risk"), ("s-c", "sales")):
        call(
            client,
            "POST",
            "registered-models/create",
            name=name,
            tags=[{"key": "team", "value": team}],
        )
    for name, number in (("s-a", 1), ("s-a", 2), ("s-b", 1)):
        tags = [{"key": "n", "value": str(number)}]
        runs[f"{name}/{number}"], _ = registered(client, name, tags=tags)
    return client, runs


@pytest.mark.parametrize(
    ("where", "order", "expected"),
    [
        ("", [], ["s-a", "s-b", "s-c"]),
        ("", ["name DESC"], ["s-c", "s-b", "s-a"]),
        ("", ["timestamp DESC", "name ASC"], None),
        ("name = 's-b'", [], ["s-b"]),
        ("name LIKE 's-%' and tags.team = 'risk'", [], ["s-a", "s-b"]),
        ("name ILIKE 'S-A'", [], ["s-a"]),
        ("name LIKE 'S-A'", [], []),
        ("tags.`team` != 'risk'", [], ["s-c"]),
        ("tags.`mlflow.prompt.is_prompt` = 'true'", [], []),
        ("tags.`mlflow.prompt.is_prompt` != 'true' and name = 's-c'", [], ["s-c"]),
    ],
)
def test_models_are_searched(
    searched: tuple[httpx.Client, dict[str, str]], where: str, order: list[str], expected: list[str] | None
) -> None:
    found, token = [], ""
    while True:
        page = call(
            searched[0],
            "GET",
            "registered-models/search",
            filter=where,
            order_by=order,
            max_results=2,
            page_token=token,
        )
        found += [each["name"] for each in page["registered_models"]]
        if not (token := page.get("next_page_token", "")):
            break

    assert sorted(found) == sorted(set(found))
    assert found == expected if expected is not None else len(found) == 3


@pytest.mark.parametrize(
    ("where", "order", "expected"),
    [
        ("", [], ["s-b/1", "s-a/2", "s-a/1"]),
        ("", ["name ASC", "version_number DESC"], ["s-a/2", "s-a/1", "s-b/1"]),
        ("name='s-a'", [], ["s-a/2", "s-a/1"]),
        ("name IN ('s-a', 's-c')", ["version_number ASC"], ["s-a/1", "s-a/2"]),
        ("version_number >= 2", [], ["s-a/2"]),
        ("run_id = '{s-a/1}'", [], ["s-a/1"]),
        ("run_id IN ('{s-a/1}', '{s-b/1}')", ["creation_timestamp ASC", "name ASC"], ["s-a/1", "s-b/1"]),
        ("tags.n = '1' and name LIKE 's-a%'", [], ["s-a/1"]),
    ],
)
def test_versions_are_searched(
    searched: tuple[httpx.Client, dict[str, str]], where: str, order: list[str], expected: list[str]
) -> None:
    client, runs = searched
    for key, run in runs.items():
        where = where.replace(f"{{{key}}}", run)
    found, token = [], ""
    while True:
        query = {"filter": where, "order_by": order, "max_results": 1, "page_token": token}
        page = call(client, "GET", "model-versions/search", **query)
        found += [f"{each['name']}/{each['version']}" for each in page["model_versions"]]
        if not (token := page.get("next_page_token", "")):
            break

    assert found == expected


@pytest.mark.parametrize(
    "where", ["nme = 'x'", "name >", "version_number = 'x'", "metrics.auc > 1", "name = 1"]
)
def test_a_filter_that_is_wrong_is_refused(served: ServedPlatform, where: str) -> None:
    for path in ("registered-models/search", "model-versions/search"):
        assert refused(served.as_admin, "GET", path, filter=where) == (400, "INVALID_PARAMETER_VALUE")


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "source",
    [
        "file:///etc/passwd",
        "s3://bucket/model",
        "/etc/passwd",
        "mlflow-artifacts:/runs/{run}/artifacts/../../x",
        "mlflow-artifacts:/runs/{run}/artifacts/model/../..",
        "mlflow-artifacts:/../runs/{run}/artifacts/model",
        "runs:/{run}/../../etc",
        "runs:/{run}/%2e%2e/model",
        "runs:/run_00000000000000000000000000/model",
        "models:/workspace:default",
        "models:/nothing/1",
        "dummy-source",
        "",
    ],
)
def test_a_source_that_is_no_folder_of_files_is_refused(served: ServedPlatform, source: str) -> None:
    run = logged_run(served.as_admin)

    status, code = refused(
        served.as_admin,
        "POST",
        "model-versions/create",
        name="reg-source",
        source=source.format(run=run),
    )

    assert (status, code) in ((400, "INVALID_PARAMETER_VALUE"), (404, "RESOURCE_DOES_NOT_EXIST"))
    assert refused(served.as_admin, "GET", "registered-models/get", name="reg-source")[0] == 404


def test_a_pickle_is_refused_and_names_the_safe_option(served: ServedPlatform) -> None:
    files = {"MLmodel": b"flavors: {sklearn: {}}", "model.bin": pickle.dumps([1])}
    run = logged_run(served.as_admin, files)

    response = httpx.post(  # without a look for names of modules: the message has model.py
        f"{served.url}{API}/model-versions/create",
        json={"name": "reg-pickle", "source": f"runs:/{run}/model"},
        headers={"Authorization": f"Bearer {served.admin}"},
    )

    assert response.status_code == 400
    assert 'serialization_format="skops"' in response.json()["message"]


def test_the_first_bytes_of_a_pickle_mark_it_unsafe(served: ServedPlatform) -> None:
    torch_like = b"PK\x03\x04" + bytes(26) + b"archive/data.pkl" + bytes(100)
    files = {"plain": pickle.dumps([1]), "torch": torch_like, "text": b"hello", "short": b"\x80"}
    run = logged_run(served.as_admin, files)

    listed = served.as_admin.get(FILES, params={"path": f"runs/{run}/artifacts/model"}).json()["files"]

    assert {each["path"]: each.get("unsafe", False) for each in listed} == {
        "plain": True,
        "torch": True,
        "text": False,
        "short": False,
    }


def test_callers_without_rights_see_and_register_nothing(served: ServedPlatform) -> None:
    client = served.as_admin
    run, _ = registered(client, "reg-closed")
    stranger, nobody = served.http(served.stranger), served.as_nobody

    for other, codes in (
        (stranger, ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED")),
        (nobody, ("UNAUTHENTICATED",)),
    ):
        for method, path, body in (
            ("POST", "model-versions/create", {"name": "reg-x", "source": f"runs:/{run}/model"}),
            ("POST", "registered-models/create", {"name": "reg-x"}),
            ("POST", "model-versions/set-tag", {"name": "reg-closed", "version": "1", "key": "a"}),
            ("DELETE", "registered-models/delete", {"name": "reg-closed"}),
            ("GET", "model-versions/get", {"name": "reg-closed", "version": "1"}),
        ):
            assert refused(other, method, path, **body)[1] in codes, path
    assert call(client, "GET", "registered-models/search", filter="name = 'reg-x'")["registered_models"] == []


def test_the_header_names_the_workspace_of_models(served: ServedPlatform) -> None:
    client = served.http(served.developer)
    client.headers["X-MLFLOW-WORKSPACE"] = "risk"
    registered(client, "reg-risk")
    call(client, "POST", "registered-models/alias", name="reg-risk", alias="champion", version="1")

    shown = call(client, "GET", "registered-models/alias", name="reg-risk", alias="champion")["model_version"]
    read = client.get(f"{FILES}/versions/reg-risk@1/artifacts/model.ubj")
    copied = call(client, "POST", "model-versions/create", name="reg-copy", source="models:/reg-risk/1")

    assert shown["version"] == "1"
    assert read.content == xgboost_ubj()
    assert copied["model_version"]["name"] == "reg-copy"
    assert refused(served.as_admin, "GET", "registered-models/get", name="reg-risk")[0] == 404


def test_tags_without_end_are_refused(served: ServedPlatform) -> None:
    client = served.as_admin
    call(client, "POST", "registered-models/create", name="reg-tags")
    many = [{"key": f"k{number}", "value": "v"} for number in range(1001)]

    at_once = refused(client, "POST", "registered-models/create", name="reg-many", tags=many)
    served.platform.models.set_tags("reg-tags", {f"k{number}": "v" for number in range(1000)})
    one_more = refused(client, "POST", "registered-models/set-tag", name="reg-tags", key="last", value="v")
    large = refused(
        client, "POST", "registered-models/set-tag", name="reg-tags", key="k1", value="x" * 50_000
    )

    assert at_once == one_more == large == (400, "INVALID_PARAMETER_VALUE")
    assert (
        len(call(client, "GET", "registered-models/get", name="reg-tags")["registered_model"]["tags"]) == 1000
    )


def test_two_that_register_at_once_get_two_versions(served: ServedPlatform) -> None:
    run = logged_run(served.as_admin)

    def register(_: int) -> str:
        body = {"name": "reg-both", "source": f"runs:/{run}/model"}
        return str(call(served.as_admin, "POST", "model-versions/create", **body)["model_version"]["version"])

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(register, range(2))) == ["1", "2"]


def test_an_altered_byte_is_not_handed_out(served: ServedPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(served.as_admin, "reg-altered")
    read = BlobContents.read

    def altered(self: BlobContents, blob: Any, **options: Any) -> Any:
        chunks = [bytes(chunk) for chunk in read(self, blob, **options)]
        return iter([bytes([chunks[0][0] ^ 1]) + chunks[0][1:], *chunks[1:]])

    monkeypatch.setattr(BlobContents, "read", altered)
    refusal = None
    try:
        response = served.as_admin.get(f"{FILES}/versions/reg-altered@1/artifacts/model.ubj")
        refusal = response.json()["error_code"] if response.is_error else "handed out"
    except httpx.RemoteProtocolError:
        refusal = "cut off"
    entries = [each for each in served.platform.audit.list(limit=50).items if each.action == "models.read"]

    assert refusal in ("DATA_LOSS", "cut off")
    assert any(each.outcome == "failed" for each in entries)


def test_prompts_are_out_of_scope(served: ServedPlatform) -> None:
    tags = [{"key": "mlflow.prompt.is_prompt", "value": "true"}]

    made = refused(served.as_admin, "POST", "registered-models/create", name="greeting", tags=tags)
    version = refused(
        served.as_admin, "POST", "model-versions/create", name="greeting", source="dummy-source", tags=tags
    )
    nobody = refused(served.as_nobody, "POST", "registered-models/create", name="greeting", tags=tags)

    assert made == version == (501, "NOT_IMPLEMENTED")
    assert nobody == (401, "UNAUTHENTICATED")


def test_the_name_tag_renames_and_the_history_of_models_grows(served: ServedPlatform) -> None:
    client = served.as_admin
    run = logged_run(client, {})
    call(client, "POST", "runs/set-tag", run_id=run, key="mlflow.runName", value="second")
    for name in ("a", "b"):
        call(client, "POST", "runs/log-model", run_id=run, model_json=f'{{"artifact_path": "{name}"}}')

    shown = call(client, "GET", "runs/get", run_id=run)["run"]
    tags = {each["key"]: each["value"] for each in shown["data"]["tags"]}

    assert shown["info"]["run_name"] == tags["mlflow.runName"] == "second"
    assert tags["mlflow.log-model.history"] == '[{"artifact_path": "a"}, {"artifact_path": "b"}]'
    for key, value in (("mlflow.runName", ""), ("mlflow.runName", "a\nb")):
        assert refused(client, "POST", "runs/set-tag", run_id=run, key=key, value=value)[0] == 400
    assert refused(client, "POST", "runs/log-model", run_id=run, model_json="{")[0] == 400
