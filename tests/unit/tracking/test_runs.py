"""Runs: started, logged to, ended and listed; visible by permission, and under the labels of their inputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from falaj.errors import Conflict, Denied, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.governance.operations.operation import operations_of
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.records.governance.residency import Label
from falaj.records.tracking import MetricPoint, RunStatus
from falaj.tracking.service import Runs
from platforms import OwnPlatform

OPERATIONS = operations_of(Runs)


def test_a_run_shows_what_was_logged(platform: OwnPlatform, runs: Runs) -> None:
    started = runs.start("churn", name="first try", params={"lr": 0.1, "depth": 4}, tags={"team": "risk"})
    platform.clock.advance(timedelta(minutes=5))
    runs.log_metrics(started.id, [MetricPoint(key="loss", value=0.5)])
    ended = runs.end(started.id)

    shown = runs.show(started.id)
    assert shown.run == ended
    assert (ended.name, ended.status, started.status) == (
        "first try",
        RunStatus.FINISHED,
        RunStatus.RUNNING,
    )
    assert ended.ended_at == ended.started_at + timedelta(minutes=5)
    assert {param.key: param.value for param in shown.params} == {"depth": "4", "lr": "0.1"}
    assert {tag.key: tag.value for tag in shown.tags} == {"team": "risk"}
    assert [metric.key for metric in shown.metrics] == ["loss"]
    assert platform.objects.show("experiment:churn").id == ended.experiment


def test_an_experiment_is_made_once_by_concurrent_starts(platform: OwnPlatform, runs: Runs) -> None:
    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(lambda _: runs.start("churn"), range(16)))

    assert len({run.experiment for run in started}) == 1
    assert len(platform.objects.list("experiment").items) == 1
    assert len(runs.list(experiments=("churn",)).items) == 16


def test_a_run_ends_once_and_can_be_resumed(runs: Runs) -> None:
    run = runs.start("churn").id
    runs.end(run, status="failed")

    with pytest.raises(Conflict, match="failed"):
        runs.end(run)
    runs.log_params(run, {"lr": 1})  # a client of MLflow logs after the end, too
    resumed = runs.update(run, status=RunStatus.RUNNING, name="again")

    assert (resumed.status, resumed.ended_at, resumed.name) == (RunStatus.RUNNING, None, "again")
    assert runs.end(run).status == RunStatus.FINISHED


# ------------------------------------------------------------------------------------ parameters, tags


def test_a_parameter_is_never_changed(runs: Runs) -> None:
    run = runs.start("churn", params={"lr": "0.1"}).id

    same = runs.log_params(run, {"lr": 0.1, "depth": 4})
    with pytest.raises(Conflict) as refused:
        runs.log_params(run, {"lr": 0.2, "seed": 1})

    assert (same.stored, same.repeated) == (1, 1)
    assert [(fault.where, fault.given) for fault in refused.value.faults] == [("params.lr", "0.2")]
    assert [param.key for param in runs.show(run).params] == ["depth", "lr"]


def test_tags_change_even_after_the_end(runs: Runs) -> None:
    run = runs.start("churn", tags={"team": "risk", "note": "a"}).id
    runs.end(run)

    runs.set_tags(run, {"note": "b", "ümläut": "ß\n"})

    assert {tag.key: tag.value for tag in runs.show(run).tags} == {
        "team": "risk",
        "note": "b",
        "ümläut": "ß\n",
    }


@pytest.mark.parametrize(
    "params",
    [{"": 1}, {"k" * 251: 1}, {"a": "x" * 16_001}, {"a": "\x00"}, {"a": float("nan")}, {"a": 10**400}],
)
def test_parameters_that_are_wrong_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        OPERATIONS["log_params"].check({"run": "run", "params": params})


# -------------------------------------------------------------------------------------------- listing


def test_a_list_has_the_newest_first_in_pages(runs: Runs) -> None:
    runs.start("other")
    started = sorted((runs.start("churn").id for _ in range(5)), reverse=True)

    first = runs.list(experiments=("churn",), limit=2)
    second = runs.list(experiments=("churn",), limit=2, after=first.next)
    third = runs.list(experiments=("churn",), limit=2, after=second.next)

    assert [run.id for page in (first, second, third) for run in page.items] == started
    assert third.next is None


# ----------------------------------------------------------------------------------------- permissions


def test_a_run_of_another_workspace_is_not_found(platform: OwnPlatform, runs: Runs) -> None:
    platform.workspaces.create("risk")
    stranger = platform.join("sam", Role.DEVELOPER, workspace="risk")
    run = runs.start("churn").id
    point = MetricPoint(key="loss", value=1.0)

    with acting_as(stranger):
        for call in (
            lambda: runs.show(run),
            lambda: runs.list(experiments=("churn",)),
            lambda: runs.metrics(run, "loss"),
            lambda: runs.log_params(run, {"a": 1}),
            lambda: runs.log_metrics(run, [point]),
            lambda: runs.end(run),
        ):
            with pytest.raises(NotFound):
                call()

    assert runs.show(run).metrics == ()


def test_experiments_of_one_name_in_two_workspaces_are_two(platform: OwnPlatform, runs: Runs) -> None:
    platform.workspaces.create("risk")

    here, there = runs.start("churn"), runs.start("churn", workspace="risk")

    assert here.experiment != there.experiment
    assert [run.id for run in runs.list(experiments=("risk/churn",)).items] == [there.id]


def test_a_viewer_reads_and_does_not_write(platform: OwnPlatform, runs: Runs) -> None:
    run = runs.start("churn").id

    with acting_as(platform.join("vera", Role.VIEWER)):
        assert runs.show(run).run.id == run
        with pytest.raises(Denied):
            runs.log_metrics(run, [MetricPoint(key="loss", value=1.0)])
        with pytest.raises(Denied):
            runs.start("churn")


# ------------------------------------------------------------------------------- labels and artifacts


def test_labels_of_inputs_flow_into_the_run_and_its_outputs(platform: OwnPlatform, runs: Runs) -> None:
    data = platform.put("patients", b"x", only=("AE",), classes=("health",))

    run = runs.start("churn", sources=("blob:patients",))
    model = platform.put("model", b"y", sources=(run.id,))
    runs.log_artifact(run.id, "model/model.onnx", "model")

    restricted = Label(only={"AE"}, classes={"health"})
    assert (run.label, model.label) == (restricted, restricted)
    assert platform.objects.show("experiment:churn").label == Label()
    above = [node.id for node in platform.lineage.graph("blob:model", direction=Direction.UP)]
    assert {data.id, run.id} < set(above)


def test_a_later_label_reaches_a_run(platform: OwnPlatform, runs: Runs) -> None:
    platform.put("patients", b"x")
    run = runs.start("churn", sources=("blob:patients",)).id

    platform.objects.label("blob:patients", only=("AE",))

    assert runs.show(run).run.label.only == {"AE"}


def test_an_artifact_has_its_path_and_size(runs: Runs, platform: OwnPlatform) -> None:
    run = runs.start("churn").id
    blob = platform.put("plot", b"12345", sources=(run,))

    attached = runs.log_artifact(run, "plots/roc.png", "plot")

    assert runs.log_artifact(run, "plots/roc.png", "plot") == attached
    assert (attached.blob, attached.size_bytes) == (blob.id, 5)
    assert runs.show(run).artifacts == (attached,)


def test_an_unrelated_blob_is_not_attached(platform: OwnPlatform, runs: Runs) -> None:
    run = runs.start("churn").id
    platform.put("stray", b"x")
    platform.put("one", b"x", sources=(run,))
    platform.put("two", b"x", sources=(run,))
    staged = platform.blobs.upload(iter([b"x"]), sources=(run,)).id
    runs.log_artifact(run, "a", "one")

    for path, blob in (("b", "stray"), ("a", "two"), ("c", staged)):
        with pytest.raises(Conflict):
            runs.log_artifact(run, path, blob)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "a\\b", "a\n", "x" * 501]
)
def test_a_path_that_escapes_the_run_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput):
        OPERATIONS["log_artifact"].check({"run": "run", "path": path, "blob": "blob"})
