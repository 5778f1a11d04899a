"""`falaj runs import` on what real MLflow clients and servers make: version 2 and 3, a file and an address."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from interfaces import ServedPlatform, serve
from polling import eventually
from virtualenvs import environment

VERSIONS = ["mlflow3", "mlflow2-store"]

TRACKED = """
import json, os
import mlflow, numpy as np
from mlflow import MlflowClient
from mlflow.entities import Metric

client = MlflowClient()
mlflow.create_experiment("churn", tags={"team": "risk"})
mlflow.set_experiment("churn")
with mlflow.start_run(run_name="first", tags={"note": "Grüße"}) as run:
    mlflow.log_params({"lr": 0.1, "depth": 3})
    mlflow.log_metric("auc", 0.9, step=1)
    for step, value in enumerate([float("nan"), float("inf"), float("-inf"), 0.5]):
        mlflow.log_metric("loss", value, step=step)
    client.log_batch(run.info.run_id, [Metric("many", i / 7, 1790000000000 + i, i) for i in range(1000)])
    mlflow.log_text("hello", "notes/hello.txt")
    mlflow.log_dict({"a": 1}, "config.json")
    mlflow.log_input(mlflow.data.from_numpy(np.arange(5.0), name="numbers"), context="training")
    if int(mlflow.__version__.split(".")[0]) >= 3:
        from sklearn.linear_model import LogisticRegression
        fitted = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
        model = mlflow.sklearn.log_model(fitted, name="classifier", pip_requirements=["scikit-learn"])
        mlflow.log_metric("auc", 0.7, step=2, model_id=model.model_id)
    with mlflow.start_run(run_name="fold", nested=True) as fold:
        mlflow.log_metric("auc", 0.1)
with mlflow.start_run(run_name="gone") as gone:
    mlflow.log_metric("auc", 0.2)
client.delete_run(gone.info.run_id)
try:
    with mlflow.start_run(run_name="broken"):
        raise ValueError
except ValueError:
    pass
client.create_run(run.info.experiment_id, run_name="open")
old = mlflow.create_experiment("old")
client.create_run(old, run_name="old run")
client.delete_experiment(old)
"""
"""What is logged, by the client alone."""
COUNTS = {"experiments": 2, "runs": 6, "datasets": 1}
OF_VERSION_2 = {
    "logged models": 0,
    "params": 2,
    "points": 1007,
    "artifacts": 2,
    "artifact bytes": len("hello") + len(json.dumps({"a": 1}, indent=2)),
}
OF_VERSION_3 = {"logged models": 1, "points": 1008}


def variables(folder: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    fixed = {"MLFLOW_DISABLE_TELEMETRY": "true", "HOME": str(folder), "GIT_PYTHON_REFRESH": "quiet"}
    return own | fixed | more


def track(version: str, folder: Path, uri: str, program: str = TRACKED) -> None:
    command = [environment(version) / "bin" / "python", "-c", program]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=variables(folder, MLFLOW_TRACKING_URI=uri),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


@contextmanager
def mlflow_server(version: str, folder: Path) -> Iterator[str]:
    """Start an `mlflow server` on a free port, and yield its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
    command = [environment(version) / "bin" / "python", "-m", "mlflow", "server", "--port", str(port), *store]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        command, cwd=folder, env=variables(folder), stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: answers(f"{url}/health"))
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        log.close()


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).is_success
    return False


def require_copied(served: ServedPlatform) -> None:
    """Check that everything that TRACKED logs is stored as it was logged."""
    platform = served.platform
    runs = {run.name: run for run in platform.runs.list(view="all").items}
    assert sorted(runs) == ["broken", "first", "fold", "gone", "old run", "open"]
    assert runs["fold"].parent == runs["first"].id
    assert {name: run.status.value for name, run in runs.items() if name in ("first", "broken", "open")} == {
        "first": "finished",
        "broken": "failed",
        "open": "running",
    }
    assert {name for name, run in runs.items() if run.deleted_at} == {"gone", "old run"}
    first = platform.runs.show(runs["first"].id)
    assert {each.key: each.value for each in first.params} == {"lr": "0.1", "depth": "3"}
    assert {each.key: each.value for each in first.tags}["note"] == "Grüße"
    points = {each.key: each.points for each in first.metrics}
    assert (points["loss"], points["many"]) == (4, 1000)
    (loss,) = platform.runs.history(first.run.id, "loss").items
    assert [point.step for point in loss.points] == [0, 1, 2, 3]
    assert math.isnan(loss.points[0].value)
    assert [point.value for point in loss.points[1:]] == [math.inf, -math.inf, 0.5]
    assert [(each.name, each.tags["mlflow.data.context"]) for each in first.datasets] == [
        ("numbers", "training")
    ]
    assert b"".join(platform.runs.read_artifact(first.run.id, "notes/hello.txt")) == b"hello"
    assert [each.key for each in platform.experiments.find("churn").tags] == [
        "falaj.import.experiment",
        "team",
    ]


def require_counts(report: Any, version: str) -> None:
    found = {each.what: each.here for each in report.counts}
    wanted = COUNTS | (OF_VERSION_3 if version == "mlflow3" else OF_VERSION_2)
    assert report.complete, report
    assert {what: found[what] for what in wanted} == wanted


def require_model(served: ServedPlatform) -> None:
    """Check that the model that a client of MLflow 3 logs has its files, its run and its metric."""
    (model,) = served.platform.loggedmodels.list().items
    run = served.platform.runs.show(str(model.source_run))
    files = {each.path for each in served.platform.loggedmodels.artifacts(model.id).items}
    assert (model.name, model.status, run.run.name) == ("classifier", "ready", "first")
    assert {"MLmodel", "requirements.txt"} <= files
    assert {each.key: each.value for each in model.metrics}["auc"] == 0.7
    assert [each.model for each in run.models_made] == [model.id]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_file_of_a_client_is_imported(version: str, tmp_path: Path) -> None:
    track(version, tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    with serve(tmp_path / "platform") as served:
        report = served.platform.import_runs(tmp_path / "mlflow.db")
        again = served.platform.import_runs(f"sqlite:///{tmp_path / 'mlflow.db'}")

        require_counts(report, version)
        assert (again.complete, again.new_runs, again.changed_runs) == (True, 0, 0)
        require_copied(served)
        if version == "mlflow3":
            require_model(served)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_is_imported_and_its_file_brings_nothing_new(version: str, tmp_path: Path) -> None:
    with mlflow_server(version, tmp_path) as url:
        track(version, tmp_path, url)
        with serve(tmp_path / "platform") as served:
            report = served.platform.import_runs(url)
            again = served.platform.import_runs(url)
            by_file = served.platform.import_runs(tmp_path / "mlflow.db")

            require_counts(report, version)
            assert (again.complete, again.new_runs, again.changed_runs) == (True, 0, 0)
            assert (by_file.complete, by_file.new_runs, by_file.changed_runs) == (True, 0, 0)
            require_copied(served)
            if version == "mlflow3":
                require_model(served)
