"""The client of MLflow from pip, the newest 3.x and one 2.x, in virtualenvs of their own: only its address differs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interfaces import ServedPlatform, serve
from virtualenvs import environment

VERSIONS = ["mlflow3", "mlflow2"]

TRACKING = """
import json, os, tempfile
import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

client = MlflowClient()
found = {}
mlflow.set_experiment("churn")
with mlflow.start_run(run_name="first") as run:
    mlflow.log_metric("auc", 0.9, step=1)
    mlflow.log_metrics({"loss": float("nan"), "f1": 0.5}, step=2)
    mlflow.log_params({"lr": 0.1, "depth": 3})
    mlflow.set_tag("team", "risk")
    mlflow.log_text("hello", "notes/hello.txt")
    mlflow.log_dict({"a": 1}, "config.json")
    with mlflow.start_run(nested=True) as child:
        mlflow.log_metric("auc", 0.1)
ident = run.info.run_id
client.log_batch(ident, [Metric("many", i, 1700000000000 + i, i) for i in range(1000)],
                 [Param("p", "1")], [RunTag("t", "1")])
data = client.get_run(ident)
found["metrics"] = {k: str(v) for k, v in data.data.metrics.items()}
found["params"] = data.data.params
found["name"], found["status"] = data.info.run_name, data.info.status
found["team"] = data.data.tags["team"]
found["parent"] = client.get_run(child.info.run_id).data.tags["mlflow.parentRunId"] == ident
found["history"] = [m.step for m in client.get_metric_history(ident, "many")] == list(range(1000))
found["artifacts"] = sorted(a.path for a in client.list_artifacts(ident))
found["inner"] = [(a.path, a.file_size) for a in client.list_artifacts(ident, "notes")]
found["text"] = mlflow.artifacts.load_text(data.info.artifact_uri + "/notes/hello.txt")
local = mlflow.artifacts.download_artifacts(run_id=ident, artifact_path="", dst_path=tempfile.mkdtemp())
found["downloaded"] = sorted(os.path.relpath(os.path.join(d, f), local) for d, _, fs in os.walk(local) for f in fs)
table = mlflow.search_runs(experiment_names=["churn"], filter_string="metrics.auc > 0.5")
found["searched"] = table["run_id"].tolist() == [ident]
client.delete_run(child.info.run_id)
found["left"] = len(client.search_runs([data.info.experiment_id]))
client.restore_run(child.info.run_id)
for name, call in {
    "param": lambda: client.log_param(ident, "lr", "2"),
    "unknown": lambda: client.get_run("run_" + "0" * 26),
    "exists": lambda: client.create_experiment("churn"),
    "filter": lambda: client.search_runs([data.info.experiment_id], "metrics.auc >"),
}.items():
    try:
        call()
    except MlflowException as error:
        found[name] = error.error_code
print(json.dumps(found))
"""

AUTOLOG = """
import json
import mlflow
import numpy as np
from mlflow import MlflowClient

mlflow.set_experiment("autolog")
found = {}
client = MlflowClient()
rng = np.random.default_rng(0)
x, y = rng.random((64, 3)), rng.integers(0, 2, 64)

def last():
    (run,) = client.search_runs([mlflow.get_experiment_by_name("autolog").experiment_id], max_results=1)
    return run

from sklearn.linear_model import LogisticRegression
mlflow.sklearn.autolog()
LogisticRegression(C=0.5).fit(x, y)
run = last()
found["sklearn"] = [run.data.params["C"], "training_score" in run.data.metrics, run.info.status]
mlflow.sklearn.autolog(disable=True)

import xgboost
mlflow.xgboost.autolog()
xgboost.train({"objective": "binary:logistic", "max_depth": 2}, xgboost.DMatrix(x, y), num_boost_round=3,
              evals=[(xgboost.DMatrix(x, y), "train")], verbose_eval=False)
run = last()
found["xgboost"] = [run.data.params["max_depth"], "train-logloss" in run.data.metrics, run.info.status]
print(json.dumps(found))
"""

LIGHTNING = """
import json, logging, warnings
warnings.filterwarnings("ignore")
import mlflow, torch, lightning
from mlflow import MlflowClient

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

mlflow.set_experiment("lightning")
mlflow.pytorch.autolog(checkpoint=False)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(32, 3), torch.rand(32, 1)), 8)
lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  accelerator="cpu").fit(Net(), data)
(run,) = MlflowClient().search_runs([mlflow.get_experiment_by_name("lightning").experiment_id], max_results=1)
print(json.dumps([run.data.params["epochs"], "loss" in run.data.metrics, run.info.status]))
"""


SAVE = """
import json, sys
import mlflow, numpy as np, xgboost
x, y = np.arange(30.0).reshape(10, 3), np.arange(10.0)
model = xgboost.train({"max_depth": 2}, xgboost.DMatrix(x, y), num_boost_round=3)
mlflow.xgboost.save_model(model, "saved", model_format="ubj")
print(json.dumps(model.predict(xgboost.DMatrix(x)).tolist()))
"""

REGISTER = """
import json, pathlib, warnings
warnings.filterwarnings("ignore")
import mlflow, numpy as np, xgboost
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sklearn.linear_model import LogisticRegression

IS_3 = mlflow.__version__.startswith("3")
client, found = MlflowClient(), {}
rng = np.random.default_rng(0)
x = rng.random((40, 3)).astype("float32")
y = (x[:, 0] > 0.5).astype(int)
booster = xgboost.train({"max_depth": 2}, xgboost.DMatrix(x, y), num_boost_round=3)

def place(name):
    return {"name": name} if IS_3 else {"artifact_path": name}

def code(call):
    try:
        call()
    except MlflowException as error:
        return error.error_code
    return "done"


with mlflow.start_run() as run:
    mlflow.log_metric("auc", 0.9)
    pinned = [f"xgboost=={xgboost.__version__}"]  # inferring packages starts a process for each model
    options = {"model_format": "ubj", "pip_requirements": pinned, "registered_model_name": "churn"}
    mlflow.xgboost.log_model(booster, **place("xgb"), **options)
version = mlflow.register_model(f"runs:/{run.info.run_id}/xgb", "churn", tags={"team": "risk"})
found["second"] = [version.version, version.status, version.run_id == run.info.run_id, version.tags]
client.set_registered_model_alias("churn", "champion", version.version)
expected = booster.predict(xgboost.DMatrix(x))
found["loads"] = {
    uri: bool(np.allclose(mlflow.pyfunc.load_model(f"models:/{uri}").predict(x), expected))
    for uri in ("churn@champion", "churn/1", "churn/latest")
}
client.transition_model_version_stage("churn", "2", "Production")
found["stage"] = bool(np.allclose(mlflow.pyfunc.load_model("models:/churn/Production").predict(x), expected))
found["latest"] = [[each.version, each.current_stage] for each in client.get_latest_versions("churn")]

client.update_registered_model("churn", "about customers")
client.update_model_version("churn", "1", "the first")
client.set_registered_model_tag("churn", "a", "1")
client.set_model_version_tag("churn", "1", "b", "2")
model, first = client.get_registered_model("churn"), client.get_model_version("churn", "1")
found["soft"] = [model.description, model.tags, model.aliases, first.description, first.tags]
client.delete_registered_model_tag("churn", "a")
client.delete_model_version_tag("churn", "1", "b")
found["untagged"] = [client.get_registered_model("churn").tags, client.get_model_version("churn", "1").tags]

found["models"] = [each.name for each in client.search_registered_models("name LIKE 'ch%'", order_by=["name DESC"])]
found["versions"] = [
    [each.name, each.version]
    for each in client.search_model_versions(
        f"run_id = '{run.info.run_id}'", order_by=["version_number ASC"], max_results=1)
    + client.search_model_versions("name = 'churn' and tags.team = 'risk'")
]
found["by alias"] = client.get_model_version_by_alias("churn", "champion").version
client.delete_registered_model_alias("churn", "champion")
client.create_registered_model("empty", {"a": "b"}, "nothing yet")
client.rename_registered_model("empty", "renamed")
client.delete_registered_model("renamed")
copied = client.copy_model_version("models:/churn/1", "copied")
found["copied"] = [copied.name, copied.version]

found["codes"] = {
    "alias": code(lambda: client.get_model_version_by_alias("churn", "champion")),
    "renamed": code(lambda: client.get_registered_model("renamed")),
    "twice": code(lambda: client.create_registered_model("churn")),
    "rename": code(lambda: client.rename_registered_model("churn", "other")),
    "delete": code(lambda: client.delete_registered_model("churn")),
    "delete version": code(lambda: client.delete_model_version("churn", "1")),
    "archive": code(lambda: client.transition_model_version_stage("churn", "1", "Archived")),
    "source": code(lambda: client.create_model_version("churn", "file:///etc/passwd")),
    "case": code(lambda: client.create_registered_model("Churn")),
}
print(json.dumps(found))
"""

FLAVOURS = """
import json, pathlib, warnings
warnings.filterwarnings("ignore")
import mlflow, numpy as np, torch, lightgbm
from mlflow.exceptions import MlflowException
from sklearn.linear_model import LogisticRegression
from skl2onnx import to_onnx

IS_3 = mlflow.__version__.startswith("3")
found = {}
x = np.random.default_rng(0).random((40, 3)).astype("float32")
y = (x[:, 0] > 0.5).astype(int)
logistic = LogisticRegression().fit(x, y)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
booster = lightgbm.train({"verbose": -1, "min_data_in_leaf": 2}, lightgbm.Dataset(x, y), num_boost_round=2)
pathlib.Path("model.py").write_text(
    "import mlflow\\n"
    "class Model(mlflow.pyfunc.PythonModel):\\n"
    "    def predict(self, context, model_input, params=None):\\n"
    "        return model_input * 2\\n"
    "mlflow.models.set_model(Model())\\n")

class Mine(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return model_input

def log(name, flavour, *given, **options):
    where = {"name": name} if IS_3 else {"artifact_path": name}
    try:
        flavour.log_model(
            *given, **where, **options, pip_requirements=["numpy"], registered_model_name=name)
    except MlflowException as error:
        found[name] = [error.error_code, str(error)]
        return
    loaded = mlflow.pyfunc.load_model(f"models:/{name}/1")
    found[name] = len(np.asarray(loaded.predict(x[:2])["output_label"] if name == "onnx" else loaded.predict(x[:2])))

with mlflow.start_run():
    log("onnx", mlflow.onnx, to_onnx(logistic, x[:1]))
    log("lightgbm", mlflow.lightgbm, booster)
    log("code", mlflow.pyfunc, python_model="model.py")
    pickle = {"serialization_format": "pickle"}
    log("sklearn-pickle", mlflow.sklearn, logistic, **pickle)
    log("torch-pickle", mlflow.pytorch, net, **(pickle if IS_3 else {}))
    log("pyfunc-pickle", mlflow.pyfunc, python_model=Mine())
    if IS_3:
        log("skops", mlflow.sklearn, logistic, serialization_format="skops")
        log("torch", mlflow.pytorch, net, input_example=x[:2])
print(json.dumps(found))
"""

ODDS = """
import json, os, pathlib
import mlflow
from mlflow import MlflowClient
client, found = MlflowClient(), {}
with mlflow.start_run(run_name="first") as run:
    client.set_tag(run.info.run_id, "mlflow.runName", "second")
found["name"] = client.get_run(run.info.run_id).info.run_name
data = os.urandom(12_000_000)
pathlib.Path("big.bin").write_bytes(data)
client.log_artifact(run.info.run_id, "big.bin", "deep/er")
client.log_artifact(run.info.run_id, "big.bin")
found["files"] = [[each.path, each.file_size] for each in client.list_artifacts(run.info.run_id, "deep/er")]
read = pathlib.Path(client.download_artifacts(run.info.run_id, "deep/er/big.bin")).read_bytes()
found["same"] = read == data
print(json.dumps(found))
"""

HISTORY = """
import json
import mlflow, numpy as np, xgboost
booster = xgboost.train({"max_depth": 1}, xgboost.DMatrix(np.eye(4), [0, 1, 0, 1]), num_boost_round=1)
with mlflow.start_run() as run:
    for name in ("one", "two"):
        mlflow.xgboost.log_model(booster, name, model_format="ubj", pip_requirements=["xgboost"])
tag = mlflow.MlflowClient().get_run(run.info.run_id).data.tags["mlflow.log-model.history"]
print(json.dumps([each["artifact_path"] for each in json.loads(tag)]))
"""

LOAD = """
import json
import mlflow, numpy as np
model = mlflow.pyfunc.load_model("models:/churn@champion")
print(json.dumps(np.asarray(model.predict(np.arange(30.0).reshape(10, 3))).tolist()))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    with serve(tmp_path_factory.mktemp("served")) as platform:
        yield platform


def in_client(served: ServedPlatform, version: str, program: str, folder: Path, **more: str) -> Any:
    """Return what a program prints as JSON, in the virtualenv of a client."""
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")},
        "MLFLOW_TRACKING_URI": served.url,
        "MLFLOW_TRACKING_TOKEN": served.admin,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HOME": str(folder),
        "GIT_PYTHON_REFRESH": "quiet",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }
    command = [environment(version) / "bin" / "python", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=variables)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_client_tracks_as_with_a_server_of_mlflow(version: str, tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        found = in_client(served, version, TRACKING, tmp_path)

    assert found == {
        "metrics": {"auc": "0.9", "loss": "nan", "f1": "0.5", "many": "999.0"},
        "params": {"lr": "0.1", "depth": "3", "p": "1"},
        "name": "first",
        "status": "FINISHED",
        "team": "risk",
        "parent": True,
        "history": True,
        "artifacts": ["config.json", "notes"],
        "inner": [["notes/hello.txt", 5]],
        "text": "hello",
        "downloaded": ["config.json", "notes/hello.txt"],
        "searched": True,
        "left": 1,
        "param": "INVALID_PARAMETER_VALUE",
        "unknown": "RESOURCE_DOES_NOT_EXIST",
        "exists": "RESOURCE_ALREADY_EXISTS",
        "filter": "INVALID_PARAMETER_VALUE",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_scikit_learn_and_xgboost_log_by_themselves(version: str, tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        found = in_client(served, version, AUTOLOG, tmp_path)

    assert found == {"sklearn": ["0.5", True, "FINISHED"], "xgboost": ["2", True, "FINISHED"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_lightning_logs_by_itself(version: str, tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        assert in_client(served, version, LIGHTNING, tmp_path) == ["2", True, "FINISHED"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_is_loaded_by_its_alias(version: str, tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        expected = in_client(served, version, SAVE, tmp_path)
        saved = tmp_path / "saved"
        paths = [path for path in sorted(saved.rglob("*")) if path.is_file()]
        blobs = [served.platform.blobs.upload(iter([path.read_bytes()])).id for path in paths]
        names = tuple(path.relative_to(saved).as_posix() for path in paths)
        registered = served.platform.models.register("churn", files=tuple(blobs), paths=names)
        served.platform.models.promote("churn@1", to="champion")

        found = in_client(served, version, LOAD, tmp_path)

    assert registered.format == "xgboost"
    assert found == expected


def test_a_variable_names_the_workspace(served: ServedPlatform, tmp_path: Path) -> None:
    program = "import json, mlflow; print(json.dumps(mlflow.create_experiment('of risk')))"
    named = {"MLFLOW_WORKSPACE": "risk", "MLFLOW_TRACKING_TOKEN": served.developer}

    ident = in_client(served, "mlflow3", program, tmp_path, **named)

    risk = served.platform.workspaces.show("risk")
    assert served.platform.experiments.show(ident).workspace == risk.id


@pytest.mark.parametrize("version", VERSIONS)
def test_models_are_registered_found_and_loaded_by_the_client(version: str, tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        found = in_client(served, version, REGISTER, tmp_path)
        made = served.platform.models.version("churn@1")
        actions = {each.action for each in served.platform.audit.list(limit=500).items}

    assert found == {
        "second": ["2", "READY", True, {"team": "risk"}],
        "loads": {"churn@champion": True, "churn/1": True, "churn/latest": True},
        "stage": True,
        "latest": [["2", "Production"]],
        "soft": [
            "about customers",
            {"a": "1"},
            {"champion": "2", "production": "2"},
            "the first",
            {"b": "2"},
        ],
        "untagged": [{}, {}],
        "models": ["churn"],
        "versions": [["churn", "1"], ["churn", "2"]],
        "by alias": "2",
        "copied": ["copied", "1"],
        "codes": {
            "alias": "RESOURCE_DOES_NOT_EXIST",
            "renamed": "RESOURCE_DOES_NOT_EXIST",
            "twice": "RESOURCE_ALREADY_EXISTS",
            "rename": "INVALID_PARAMETER_VALUE",
            "delete": "INVALID_PARAMETER_VALUE",
            "delete version": "INVALID_STATE",
            "archive": "INVALID_PARAMETER_VALUE",
            "source": "INVALID_PARAMETER_VALUE",
            "case": "INVALID_PARAMETER_VALUE",
        },
    }
    assert (made.format, made.description) == ("xgboost", "the first")
    assert any(pin.name == "xgboost" for pin in made.packages)
    assert {"models.register_artifacts", "models.promote", "models.read", "models.remove_alias"} <= actions


@pytest.mark.parametrize("version", VERSIONS)
def test_safe_flavours_are_registered_and_pickles_name_the_safe_one(version: str, tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        found = in_client(served, version, FLAVOURS, tmp_path)
        formats = {
            each.name: served.platform.models.version(f"{each.name}@1").format.value
            for each in served.platform.models.list().items
            if each.versions
        }

    safe = {"onnx": "onnx", "lightgbm": "lightgbm", "code": "mlflow"}
    safe |= {"skops": "skops", "torch": "torch-export"} if version == "mlflow3" else {}
    assert formats == safe
    assert {name: found.pop(name) for name in safe} == dict.fromkeys(safe, 2)
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(
        ("sklearn-pickle", "torch-pickle", "pyfunc-pickle"), "INVALID_PARAMETER_VALUE"
    )
    options = {
        "sklearn-pickle": 'serialization_format="skops"',
        "torch-pickle": 'serialization_format="pt2"',
        "pyfunc-pickle": 'python_model="model.py"',
    }
    assert [name for name, option in options.items() if option not in found[name][1]] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_large_files_arrive_in_parts_and_a_tag_renames(version: str, tmp_path: Path) -> None:
    parts = {
        "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "true",
        "MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": "1000000",
        "MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE": str(5 << 20),
    }
    with serve(tmp_path / "platform") as served:
        found = in_client(served, version, ODDS, tmp_path, **parts)
        entries = served.platform.audit.list(limit=500).items

    assert found == {"name": "second", "files": [["deep/er/big.bin", 12_000_000]], "same": True}
    assert len([each for each in entries if each.action == "uploads.send_part"]) == 6


def test_the_history_of_logged_models_has_all_of_them(tmp_path: Path) -> None:
    with serve(tmp_path / "platform") as served:
        assert in_client(served, "mlflow2", HISTORY, tmp_path) == ["one", "two"]
