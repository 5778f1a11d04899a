"""`platform.import_runs`: MLflow servers that lie, die, are of another version, or want a token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from falaj.errors import InvalidInput, Unauthenticated, Unavailable
from falaj.sdk.run_import import mlflow_server
from mlflow_servers import API, ScriptedMlflow, scripted_mlflow
from platforms import OwnPlatform

METRICS = {"metrics": [{"key": "loss", "value": 1.0, "timestamp": 1790000000000, "step": 1}]}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_server, "WAIT_S", 0.01)
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedMlflow]:
    with scripted_mlflow() as script:
        script.serve_run(data=METRICS)
        script.answers[f"{API}/metrics/get-history"] = lambda _: METRICS
        yield script


def test_a_run_is_copied_with_its_pages_of_history(
    light_platform: OwnPlatform, server: ScriptedMlflow
) -> None:
    def history(asked: dict[str, Any]) -> Any:
        start = int(asked.get("page_token", 0))
        values: list[Any] = ["NaN", "-Infinity", 1.7976931348623157e308, 0.5]
        points = [
            {"key": "loss", "value": values[at % 4], "timestamp": str(1790000000000 + at), "step": str(at)}
            for at in range(start, start + 2)
        ]
        twice = points + points  # the store of files keeps a point as often as it is logged
        return {"metrics": twice, **({"next_page_token": str(start + 2)} if start < 4 else {})}

    server.answers[f"{API}/metrics/get-history"] = history

    report = light_platform.import_runs(server.url)

    assert report.complete, report
    (run,) = light_platform.runs.list().items
    (loss,) = light_platform.runs.history(run.id, "loss").items
    assert [point.step for point in loss.points] == [0, 1, 2, 3, 4, 5]
    assert math.isnan(loss.points[0].value)
    assert [point.value for point in loss.points[1:4]] == [-math.inf, math.inf, 0.5]


def test_artifacts_are_copied_and_paths_that_lead_out_are_not(
    light_platform: OwnPlatform, server: ScriptedMlflow
) -> None:
    listed = {
        "": ["model", "../../etc/passwd", "/etc/passwd", "a.txt"],
        "model": ["model/b.bin", "other/c.bin", "model/../../d.bin"],
    }
    server.answers[f"{API}/artifacts/list"] = lambda asked: {
        "files": [
            {"path": path, "is_dir": path == "model", "file_size": "3"}
            for path in listed[asked.get("path", "")]
        ]
    }
    server.answers["/get-artifact"] = lambda asked: b"abc" if asked["run_id"] == "r1" else 404

    report = light_platform.import_runs(server.url)

    (run,) = light_platform.runs.list().items
    assert report.complete
    assert [each.path for each in light_platform.runs.show(run.id).artifacts] == ["a.txt", "model/b.bin"]
    assert any("not below their folder: 4" in note for note in report.notes)


def test_logged_models_are_copied_and_only_by_the_proxy_for_artifacts(
    light_platform: OwnPlatform, server: ScriptedMlflow
) -> None:
    info = {"model_id": "m-1", "name": "net", "status": "LOGGED_MODEL_READY", "source_run_id": "r1"}
    models = [
        {"info": info | {"artifact_uri": "mlflow-artifacts:/1/models/m-1/artifacts"}},
        {"info": info | {"model_id": "m-2", "name": "far", "artifact_uri": "s3://bucket/m-2"}},
    ]
    server.answers[f"{API}/logged-models/search"] = lambda _: {"models": models}
    server.answers[f"{API}/logged-models/m-1/artifacts/directories"] = lambda _: {
        "files": [{"path": "MLmodel", "file_size": 3}, {"path": "../MLmodel", "file_size": 3}]
    }
    server.answers["/api/2.0/mlflow-artifacts/artifacts/1/models/m-1/artifacts/MLmodel"] = lambda _: b"abc"

    report = light_platform.import_runs(server.url)

    found = {each.name: each for each in light_platform.loggedmodels.list().items}
    assert report.complete, report
    assert b"".join(light_platform.loggedmodels.read_artifact(found["net"].id, "MLmodel")) == b"abc"
    assert [len(light_platform.loggedmodels.artifacts(found[name].id).items) for name in ("net", "far")] == [
        1,
        0,
    ]
    assert any("does not hand out" in note for note in report.notes)


def test_an_artifact_that_the_server_cannot_read_is_named_and_tried_again(
    light_platform: OwnPlatform, server: ScriptedMlflow
) -> None:
    server.answers[f"{API}/artifacts/list"] = lambda _: {"files": [{"path": "a.txt", "file_size": 3}]}
    server.answers["/get-artifact"] = lambda _: 500

    first = light_platform.import_runs(server.url)
    server.answers["/get-artifact"] = lambda _: b"abc"
    second = light_platform.import_runs(server.url)

    assert not first.complete
    assert "a.txt" in first.problems[0]
    assert second.complete
    assert second.changed_runs == 1


def test_the_token_of_the_environment_is_sent_and_never_told(
    light_platform: OwnPlatform, server: ScriptedMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret-token")

    report = light_platform.import_runs(server.url)
    server.answers[f"{API}/experiments/search"] = lambda _: 403
    with pytest.raises(Unauthenticated) as caught:
        light_platform.import_runs(server.url)

    assert {headers["Authorization"] for _, headers in server.seen} == {"Bearer s3cret-token"}
    assert "s3cret" not in report.model_dump_json() + str(caught.value)
    assert "s3cret" not in str(light_platform.entries())


def test_a_password_in_the_address_is_refused(light_platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput) as caught:
        light_platform.import_runs("http://ada:hunter2@127.0.0.1:1")

    assert "hunter2" not in str(caught.value)
    assert "MLFLOW_TRACKING_PASSWORD" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "fits"), [(b"1.30.0", False), (b"4.0.0", False), (b"2.22.5", True), (b"<html>", True)]
)
def test_a_server_of_another_version_is_refused(
    light_platform: OwnPlatform, server: ScriptedMlflow, version: bytes, fits: bool
) -> None:
    server.answers["/version"] = lambda _: version

    if fits:
        assert light_platform.import_runs(server.url).complete
        return
    with pytest.raises(InvalidInput, match="MLflow 2 or 3"):
        light_platform.import_runs(server.url)
    assert light_platform.experiments.list().items == ()


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[]", b'{"experiments": 3}', b'{"experiments": [{}]}', 404, b"[" * 100_000]
)
def test_a_server_that_is_no_mlflow_is_refused(
    light_platform: OwnPlatform, server: ScriptedMlflow, answer: Any
) -> None:
    server.answers[f"{API}/experiments/search"] = lambda _: answer

    with pytest.raises(InvalidInput):
        light_platform.import_runs(server.url)

    assert light_platform.experiments.list().items == ()


def test_pages_that_never_end_are_noticed(light_platform: OwnPlatform, server: ScriptedMlflow) -> None:
    server.answers[f"{API}/experiments/search"] = lambda _: {"experiments": [], "next_page_token": "again"}

    with pytest.raises(InvalidInput, match="not valid"):
        light_platform.import_runs(server.url)


def test_an_answer_that_is_too_large_is_not_read(
    light_platform: OwnPlatform, server: ScriptedMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_server, "ANSWER_BYTES", 1000)
    server.answers[f"{API}/experiments/search"] = lambda _: b" " * 5000

    with pytest.raises(InvalidInput) as caught:
        light_platform.import_runs(server.url)

    assert caught.value.code == "input.too_large"


def test_a_server_that_dies_in_between_is_continued(
    light_platform: OwnPlatform, server: ScriptedMlflow
) -> None:
    runs = [
        {"info": {"run_id": f"r{at}", "start_time": 1790000000000 + at}, "data": METRICS} for at in range(3)
    ]
    server.answers[f"{API}/runs/search"] = lambda _: {"runs": runs}
    asked = 0

    def history(_: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        return METRICS if asked == 1 else 503

    server.answers[f"{API}/metrics/get-history"] = history
    with pytest.raises(Unavailable, match="answers 503"):
        light_platform.import_runs(server.url)
    before = len(light_platform.runs.list().items)
    server.answers[f"{API}/metrics/get-history"] = lambda _: METRICS

    report = light_platform.import_runs(server.url)

    assert before == 1
    assert report.complete
    assert report.new_runs == 2


def test_a_server_that_is_busy_for_a_moment_is_asked_again(
    light_platform: OwnPlatform, server: ScriptedMlflow
) -> None:
    asked = 0

    def search(_: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        return 429 if asked < 3 else {"experiments": []}

    server.answers[f"{API}/experiments/search"] = search

    assert light_platform.import_runs(server.url).complete
    assert asked == 3


def test_nobody_answers(light_platform: OwnPlatform) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        light_platform.import_runs("http://127.0.0.1:9")


def test_a_redirect_is_not_followed(light_platform: OwnPlatform, server: ScriptedMlflow) -> None:
    server.answers[f"{API}/experiments/search"] = lambda _: 302

    with pytest.raises(InvalidInput, match="not valid"):
        light_platform.import_runs(server.url)
