"""Versions made of what was logged to runs and logged models: signed, scanned, traced, and never half-written."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select, update

import model_files
from falaj.errors import Conflict, Damaged, Denied, FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.governance.tables import blobs as blobs_table
from falaj.records.governance.identity import Role
from falaj.records.registry import FileFormat
from falaj.records.tracking import MetricPoint
from falaj.registry.service import Models
from falaj.registry.tables import models as models_table
from falaj.registry.tables import versions
from platforms import OwnPlatform
from processes import running

DOOMED = Path(__file__).parents[2] / "killed_platform.py"
MLMODEL = (
    b"artifact_path: model\nflavors:\n  %b:\n    data: model.x\n  python_function:\n    env: {}\nrun_id: x\n"
)
XGBOOST = {
    "MLmodel": MLMODEL % b"xgboost",
    "model.ubj": model_files.xgboost_ubj(),
    "requirements.txt": b"mlflow==3.17.2\nxgboost==3.1.0 ; python_version > '3'\n-r other.txt\nnumpy\n",
}
PICKLED = {"MLmodel": MLMODEL % b"sklearn", "model.pkl": pickle.dumps([1, 2])}


def logged_run(
    platform: OwnPlatform, files: Mapping[str, bytes] = XGBOOST, *, workspace: str | None = None
) -> str:
    """Return the id of a run with these files in its folder `model`, and a metric."""
    run = platform.runs.start("churn", workspace=workspace).id
    for path, content in files.items():
        platform.runs.upload_artifact(run, f"model/{path}", iter([content]))
    platform.runs.log_metrics(
        run, [MetricPoint(key="auc", value=0.9), MetricPoint(key="bad", value=float("nan"))]
    )
    return run


def test_files_of_a_run_become_a_signed_version(platform: OwnPlatform, models: Models) -> None:
    run = logged_run(platform)

    made = models.register_artifacts(
        "churn", source=run, folder="model", run=run, description="first", tags={"team": "risk"}
    )

    assert (made.reference, made.format, made.run) == ("churn@1", FileFormat.XGBOOST, run)
    assert [file.path for file in made.files] == ["MLmodel", "model.ubj", "requirements.txt"]
    assert made.metrics == {"auc": 0.9}
    assert [(pin.name, pin.version) for pin in made.packages] == [("mlflow", "3.17.2"), ("xgboost", "3.1.0")]
    assert (made.description, [(tag.key, tag.value) for tag in made.tags]) == ("first", [("team", "risk")])
    assert models.version("churn@1") == made
    assert b"".join(models.read("churn@1", "model.ubj")) == model_files.xgboost_ubj()
    *_, verdict = models.verify("churn@1")
    assert verdict.ok
    assert run in {node.id for node in platform.lineage.graph(made.id)}


def test_files_of_a_logged_model_become_a_version_of_its_run(platform: OwnPlatform, models: Models) -> None:
    run = platform.runs.start("churn").id
    model = platform.loggedmodels.create("churn", source_run=run).id
    for path, content in XGBOOST.items():
        platform.loggedmodels.upload_artifact(model, path, iter([content]))
    platform.runs.log_metrics(run, [MetricPoint(key="f1", value=0.5, model=model)])

    made = models.register_artifacts("churn", source=model)

    assert (made.run, made.sources, made.metrics) == (run, (model,), {"f1": 0.5})


def test_a_version_is_copied_to_another_model(light_platform: OwnPlatform, models: Models) -> None:
    run = logged_run(light_platform)
    first = models.register_artifacts("churn", source=run, folder="model")

    copied = models.register_artifacts("fraud", source="model_version:churn@1")

    assert [file.sha256 for file in copied.files] == [file.sha256 for file in first.files]
    assert (copied.reference, copied.run, copied.sources) == ("fraud@1", run, (first.id,))


def test_the_version_keeps_its_bytes_when_its_run_is_gone(
    light_platform: OwnPlatform, models: Models
) -> None:
    run = logged_run(light_platform)
    models.register_artifacts("churn", source=run, folder="model")

    light_platform.runs.delete_artifact(run, "model")
    light_platform.runs.delete(run)

    *_, verdict = models.verify("churn@1")
    assert verdict.ok
    with pytest.raises(Conflict, match="deleted"):
        models.register_artifacts("churn", source=run, folder="model")


def test_what_only_mlflow_loads_is_kept_and_not_served(light_platform: OwnPlatform, models: Models) -> None:
    code = b"import mlflow\nclass Model(mlflow.pyfunc.PythonModel):\n    def predict(self, x): return x\n"
    run = logged_run(light_platform, {"MLmodel": MLMODEL % b"loader", "model.py": code, "empty.py": b""})

    made = models.register_artifacts("code", source=run, folder="model")

    assert made.format is FileFormat.MLFLOW
    with pytest.raises(FalajError, match=r"mlflow\.onnx\.log_model"):
        light_platform.endpoints.deploy("code", model="code@1")


# ------------------------------------------------------------------------------------------------ pickles


@pytest.mark.parametrize(
    ("flavour", "option"),
    [
        (b"sklearn", 'serialization_format="skops"'),
        (b"pytorch", 'serialization_format="pt2"'),
        (b"lightgbm", "booster_"),
        (b"custom", 'python_model="model.py"'),
    ],
)
def test_a_pickle_is_refused_with_the_option_of_its_flavour(
    light_platform: OwnPlatform, models: Models, flavour: bytes, option: str
) -> None:
    run = logged_run(light_platform, PICKLED | {"MLmodel": MLMODEL % flavour})

    with pytest.raises(InvalidInput) as refused:
        models.register_artifacts("churn", source=run, folder="model")

    assert option in str(refused.value)
    assert "model.pkl" in str(refused.value)
    assert models.list().items == ()


def test_a_policy_allows_pickles_and_nothing_else_does(light_platform: OwnPlatform, models: Models) -> None:
    run = logged_run(light_platform, PICKLED)
    other = 'forbid (principal, action == Action::"models.promote", resource) when { false };'
    light_platform.policies.publish("other", text=other)
    with pytest.raises(InvalidInput, match="pickle"):
        models.register_artifacts("churn", source=run, folder="model")

    rule = 'permit (principal, action == Action::"models.store_pickle", resource);'
    light_platform.policies.publish("pickles", text=rule)
    made = models.register_artifacts("churn", source=run, folder="model")

    assert made.format is FileFormat.PICKLE
    with pytest.raises(FalajError, match="runs code"):
        light_platform.endpoints.deploy("churn", model="churn@1")
    light_platform.policies.withdraw("pickles")
    with pytest.raises(InvalidInput, match="pickle"):
        models.register_artifacts("churn", source=run, folder="model")


# ---------------------------------------------------------------------------------------------- bad input


def test_a_caller_who_may_read_but_not_register_is_denied(
    light_platform: OwnPlatform, models: Models
) -> None:
    run = logged_run(light_platform)
    viewer = light_platform.join("vera", Role.VIEWER)

    with acting_as(viewer), pytest.raises(Denied):
        models.register_artifacts("churn", source=run, folder="model")

    forbid = 'forbid (principal, action == Action::"models.register", resource);'
    light_platform.policies.publish("no-registering", text=forbid)
    with pytest.raises(Denied, match=r"models\.register"):
        models.register_artifacts("churn", source=run, folder="model")
    assert models.list().items == ()


def test_a_run_of_another_workspace_is_no_source(platform: OwnPlatform, models: Models) -> None:
    platform.workspaces.create("risk")
    run = logged_run(platform, workspace="risk")
    dana = platform.join("dana", Role.DEVELOPER)

    with acting_as(dana), pytest.raises(NotFound):
        models.register_artifacts("churn", source=run, folder="model")
    with pytest.raises(InvalidInput, match="workspace default"):
        models.register_artifacts("churn", source=run, folder="model")
    assert models.register_artifacts("churn", source=run, folder="model", workspace="risk").number == 1


def test_another_run_than_the_source_is_refused(light_platform: OwnPlatform, models: Models) -> None:
    run, other = logged_run(light_platform), logged_run(light_platform)

    with pytest.raises(InvalidInput, match="the run that made them"):
        models.register_artifacts("churn", source=run, folder="model", run=other)


@pytest.mark.parametrize(
    ("folder", "error"),
    [("../x", InvalidInput), ("model/../..", InvalidInput), ("/etc", InvalidInput), ("none", NotFound)],
)
def test_a_folder_outside_of_the_files_is_refused(
    light_platform: OwnPlatform, models: Models, folder: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        models.register_artifacts("churn", source=logged_run(light_platform), folder=folder)


def test_names_that_differ_by_case_and_strange_names_are_refused(
    light_platform: OwnPlatform, models: Models
) -> None:
    twice = logged_run(light_platform, XGBOOST | {"mlmodel": b"x"})
    strange = logged_run(light_platform, XGBOOST | {"a b.txt": b"x"})

    for run, message in ((twice, "regard to case"), (strange, "a path is")):
        with pytest.raises(InvalidInput, match=message):
            models.register_artifacts("churn", source=run, folder="model")
    for name in ("Churn", "churn/x", "ch urn", ""):
        with pytest.raises(InvalidInput, match="a name is"):
            models.register_artifacts(name, source=twice, folder="model")


def test_a_description_that_lies_is_refused(light_platform: OwnPlatform, models: Models) -> None:
    for content in (b"[1, 2", b"flavors: 5", b"- a", b"!!python/object:os.system {}", b"x" * (2 << 20)):
        run = logged_run(light_platform, XGBOOST | {"MLmodel": content})
        with pytest.raises(InvalidInput, match="MLmodel"):
            models.register_artifacts("churn", source=run, folder="model")


def test_an_altered_byte_is_refused_and_audited(light_platform: OwnPlatform, models: Models) -> None:
    made = models.register_artifacts("churn", source=logged_run(light_platform), folder="model")
    blob = next(file.blob for file in made.files if file.path == "model.ubj")
    with light_platform.database.write() as tx:
        tx.execute(update(blobs_table).where(blobs_table.c.id == blob).values(sha256="0" * 64))

    with pytest.raises(Damaged):
        b"".join(models.read("churn@1", "model.ubj"))

    entries = [each for each in light_platform.audit.list().items if each.action == "models.read"]
    assert any(each.outcome == "failed" for each in entries)


def test_two_that_register_at_once_get_two_numbers(platform: OwnPlatform, models: Models) -> None:
    run = logged_run(platform)

    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(models.register_artifacts, "churn", source=run, folder="model") for _ in range(4)
        ]
        numbers = sorted(call.result().number for call in calls)

    assert numbers == [1, 2, 3, 4]


@pytest.mark.slow
def test_kill_9_while_registering_leaves_nothing(
    platform: OwnPlatform, models: Models, tmp_path: Path
) -> None:
    run = logged_run(platform)
    with running(DOOMED, str(tmp_path), "stop_while_registering", run) as child:
        assert child.line() == "stopped"
        child.kill()

    left = [platform.count(table) for table in (models_table, versions)]
    again = models.register_artifacts("churn", source=run, folder="model")

    assert left == [0, 0]
    assert again.number == 1
    with platform.database.read() as tx:
        assert tx.execute(select(versions.c.number)).scalars().all() == [1]
