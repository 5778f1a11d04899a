"""`platform.import_runs`: an MLflow database in a file, whole, changed, hostile and damaged."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from falaj.errors import AlreadyExists, Damaged, Denied, FalajError, InvalidInput, NotFound, Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.tracking import ListedRun, MetricPoint, RunDetails
from falaj.sdk.run_import import importer, mlflow_file
from falaj.sdk.run_import.report import ImportReport
from foreign_runs import STARTED, MlflowFixture
from platforms import OwnPlatform

PARENT = "mlflow.parentRunId"
NAMES = (
    "experiments",
    "runs",
    "logged models",
    "params",
    "tags",
    "points",
    "datasets",
    "artifacts",
    "artifact bytes",
)


@pytest.fixture(params=[2, 3])
def mlflow(request: pytest.FixtureRequest, tmp_path: Path) -> MlflowFixture:
    """A database with an experiment of four runs: one inside another, one deleted, one that still runs."""
    made = MlflowFixture(tmp_path / "mlflow", version=request.param).create()
    fill(made)
    return made


@pytest.fixture
def plain(tmp_path: Path) -> MlflowFixture:
    made = MlflowFixture(tmp_path / "mlflow").create()
    made.experiment(1, "churn")
    return made


def fill(made: MlflowFixture) -> None:
    made.experiment(1, "churn", tags={"team": "risk"})
    made.run("b-child", name="fold", tags={PARENT: "c-parent", "mlflow.runName": "fold"})
    made.run(
        "c-parent",
        name="first",
        params={"lr": "0.1", "depth": "3"},
        tags={"team": "risk", "mlflow.user": "ada"},
        points=[
            ("auc", 0.5, 0, 1),
            ("auc", 0.9, 1, 2),
            ("loss", math.nan, 0, 1),
            ("loss", 1.7976931348623157e308, 1, 2),
            ("loss", -1.7976931348623157e308, 2, 3),
        ],
        files={"notes/hello.txt": b"hello", "weights.bin": bytes(3_000_000)},
    )
    made.dataset("c-parent")
    made.run("d-deleted", stage="deleted", points=[("auc", 0.1, 0, 1)])
    made.run("e-running", status="RUNNING")


def counts(report: ImportReport) -> dict[str, int]:
    assert all(each.source == each.here for each in report.counts), report
    return {each.what: each.here for each in report.counts}


def runs_of(platform: OwnPlatform, *, view: Any = "all") -> dict[str, ListedRun]:
    return {run.name: run for run in platform.runs.list(view=view, limit=1000).items}


def details(platform: OwnPlatform, name: str) -> RunDetails:
    return platform.runs.show(runs_of(platform)[name].id)


def test_everything_of_a_run_is_copied(platform: OwnPlatform, mlflow: MlflowFixture) -> None:
    report = platform.import_runs(mlflow.path)

    found = details(platform, "first")
    assert report.complete
    assert counts(report) == dict(zip(NAMES, (1, 4, 0, 2, 2, 6, 1, 2, 3_000_005), strict=True))
    assert {each.key: each.value for each in found.params} == {"lr": "0.1", "depth": "3"}
    assert {each.key: each.value for each in found.tags} == {
        "team": "risk",
        "mlflow.user": "ada",
        "falaj.import.run": "mlflow:c-parent",
    }
    assert (found.run.status, found.run.user) == ("finished", "ada")
    assert found.run.started_at.timestamp() * 1000 == STARTED
    assert found.run.ended_at is not None
    assert found.run.ended_at.timestamp() * 1000 == STARTED + 60_000
    assert [each.name for each in found.datasets] == ["trips"]
    assert found.datasets[0].tags == {"mlflow.data.context": "training"}
    assert b"".join(platform.runs.read_artifact(found.run.id, "notes/hello.txt")) == b"hello"
    assert platform.experiments.find("churn").tags[-1].value == "risk"


def test_points_keep_steps_times_nan_and_infinities(platform: OwnPlatform, mlflow: MlflowFixture) -> None:
    platform.import_runs(mlflow.path)

    run = runs_of(platform)["first"].id
    (loss,) = platform.runs.history(run, "loss").items
    assert [point.step for point in loss.points] == [0, 1, 2]
    assert math.isnan(loss.points[0].value)
    assert [point.value for point in loss.points[1:]] == [math.inf, -math.inf]
    assert [point.timestamp.timestamp() * 1000 - STARTED for point in loss.points] == [1, 2, 3]


def test_nested_deleted_and_running_runs_stay_what_they_are(
    platform: OwnPlatform, mlflow: MlflowFixture
) -> None:
    platform.import_runs(mlflow.path)

    found = runs_of(platform)
    assert found["fold"].parent == found["first"].id  # although it comes first in the file
    assert found["e-running"].status == "running"
    assert found["d-deleted"].deleted_at is not None
    assert sorted(runs_of(platform, view="active")) == ["e-running", "first", "fold"]


def test_a_second_import_brings_only_what_is_new(platform: OwnPlatform, mlflow: MlflowFixture) -> None:
    platform.import_runs(mlflow.path)
    before = len(platform.entries())
    again = platform.import_runs(mlflow.path)
    actions = {entry["action"] for entry in platform.entries()[before:]}
    mlflow.points("c-parent", [("auc", 0.95, 2, 3)])
    mlflow.points("d-deleted", [("auc", 0.2, 1, 2)])
    mlflow.sql("UPDATE runs SET status = ? WHERE run_uuid = ?", [("FAILED", "e-running")])
    mlflow.run("f-new", params={"lr": "0.3"})

    last = platform.import_runs(mlflow.path)

    assert (again.new_runs, again.changed_runs, again.complete) == (0, 0, True)
    assert actions <= {"runs.list", "runs.show", "experiments.list"}
    assert (last.new_runs, last.changed_runs, last.complete) == (1, 2, True)
    found = runs_of(platform)
    assert len(found) == 5
    assert found["e-running"].status == "failed"
    assert found["d-deleted"].deleted_at is not None
    assert details(platform, "first").metrics[0].points == 3
    assert details(platform, "d-deleted").metrics[0].points == 2


def test_an_import_that_fails_continues_where_it_ended(
    platform: OwnPlatform, mlflow: MlflowFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform goes away at each write in turn, when it has taken effect."""
    attempts = 0
    report = None
    while report is None:
        attempts += 1
        with monkeypatch.context() as patch:
            lose_an_answer(platform, patch, number=1)
            try:
                report = platform.import_runs(mlflow.path)
            except Unavailable:
                assert attempts < 30

    assert attempts > 12
    assert counts(report) == dict(zip(NAMES, (1, 4, 0, 2, 2, 6, 1, 2, 3_000_005), strict=True))
    assert len(runs_of(platform)) == 4
    assert [each.points for each in details(platform, "first").metrics] == [2, 3]


def lose_an_answer(platform: OwnPlatform, patch: pytest.MonkeyPatch, *, number: int) -> None:
    """Let the write of this number take effect, without its caller knowing."""
    left = number
    gate = type(platform.parts.gate)
    perform = gate.perform

    def performed(self: Any, operation: Any, service: Any, given: Any) -> Any:
        nonlocal left
        result = perform(self, operation, service, given)
        left -= not operation.mode.reads
        if left <= 0:
            raise Unavailable("the answer is lost")
        return result

    patch.setattr(gate, "perform", performed)


def test_what_users_change_here_stays(light_platform: OwnPlatform, mlflow: MlflowFixture) -> None:
    platform = light_platform
    platform.import_runs(mlflow.path)
    run = runs_of(platform)["first"].id
    platform.runs.set_tags(run, {"team": "fraud", "reviewed": "yes"})
    platform.runs.log_metrics(run, (MetricPoint(key="auc", value=1.0, step=9),))
    platform.runs.delete(runs_of(platform)["fold"].id)

    report = platform.import_runs(mlflow.path)

    assert report.complete
    assert (report.new_runs, report.changed_runs) == (0, 0)
    assert {"team": "fraud", "reviewed": "yes"}.items() <= {
        each.key: each.value for each in details(platform, "first").tags
    }.items()
    assert runs_of(platform)["fold"].deleted_at is not None
    assert any("deleted here" in note for note in report.notes)


def test_a_deleted_experiment_is_deleted_with_its_runs_and_comes_back_with_them(
    light_platform: OwnPlatform, plain: MlflowFixture
) -> None:
    platform = light_platform
    plain.experiment(2, "old", stage="deleted")
    plain.run("r1", experiment=2, stage="deleted", points=[("auc", 1.0, 0, 0)])

    first = platform.import_runs(plain.path)
    plain.run("r2", experiment=2, stage="deleted")
    second = platform.import_runs(plain.path)

    assert first.complete
    assert second.complete
    assert platform.experiments.find("old").deleted_at is not None
    assert runs_of(platform, view="active") == {}
    platform.experiments.restore(platform.experiments.find("old").id)
    assert sorted(runs_of(platform, view="active")) == ["r1", "r2"]


def test_experiments_that_exist_are_not_mixed_up(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    platform = light_platform
    own = platform.experiments.create("churn")
    plain.run("r1")

    with pytest.raises(AlreadyExists, match="--merge"):
        platform.import_runs(plain.path)
    assert platform.runs.list().items == ()
    prefixed = platform.import_runs(plain.path, prefix="mlflow/")
    assert prefixed.complete
    assert platform.experiments.find("mlflow/churn").id != own.id

    other = MlflowFixture(plain.folder / "other").create()
    other.experiment(1, "churn")
    other.sql("UPDATE experiments SET creation_time = ? WHERE experiment_id = 1", [(STARTED + 99,)])
    other.run("r9")
    merged = platform.import_runs(other.path, merge=True)
    again = platform.import_runs(other.path, merge=True)

    assert (merged.new_runs, again.new_runs) == (1, 0)
    assert runs_of(platform)["r9"].experiment == own.id


def test_only_named_experiments_are_copied(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    plain.experiment(2, "Churn")  # another one: case counts
    plain.run("r1")
    plain.run("r2", experiment=2)

    report = light_platform.import_runs(plain.path, experiments=["Churn"])

    assert counts(report)["runs"] == 1
    assert list(runs_of(light_platform)) == ["r2"]
    with pytest.raises(NotFound, match="it has churn, Churn"):
        light_platform.import_runs(plain.path, experiments=["CHURN"])


def test_experiments_of_another_workspace_of_mlflow_have_its_name(
    light_platform: OwnPlatform, plain: MlflowFixture
) -> None:
    plain.sql(
        "INSERT INTO experiments (experiment_id, name, lifecycle_stage, workspace) VALUES (?, ?, ?, ?)",
        [(2, "churn", "active", "risk")],
    )

    light_platform.import_runs(plain.path)

    assert [each.name for each in light_platform.experiments.list().items] == ["risk/churn", "churn"]


def test_values_that_are_too_long_are_whole_in_an_artifact(
    light_platform: OwnPlatform, plain: MlflowFixture
) -> None:
    huge = "x" * 50_000_000
    plain.run("r1", params={"prompt": huge, "lr": "1"}, tags={"note": "ü" * 16_001})

    report = light_platform.import_runs(plain.path)

    found = details(light_platform, "r1")
    assert report.complete
    assert all(len(each.value) <= 16_000 for each in (*found.params, *found.tags))
    whole = b"".join(light_platform.runs.read_artifact(found.run.id, "falaj-import/long-values.json"))
    assert len(whole) > 50_000_000
    assert huge[:100].encode() in whole
    assert "ü".encode() * 16_001 in whole


def test_names_that_are_not_valid_are_changed_and_never_mixed(
    light_platform: OwnPlatform, plain: MlflowFixture
) -> None:
    points = [("loss(train)", 1.0, 0, 0), ("loss_train_", 2.0, 0, 0), ("loss[train]", 3.0, 0, 0)]
    plain.run("r1", name="a\x07b", params={"a\x00": "1", "": "2"}, tags={"k" * 300: "\x00"}, points=points)

    report = light_platform.import_runs(plain.path)

    found = details(light_platform, "a_b")
    assert report.complete
    assert sorted(each.last for each in found.metrics) == [1.0, 2.0, 3.0]
    assert {each.key: each.last for each in found.metrics}["loss_train_"] == 2.0
    assert len(found.params) == 2
    assert any("another name" in note for note in report.notes)


def test_more_values_than_one_call_takes(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    params = {f"p{number}": "x" * 100 for number in range(2_500)}
    points = [("loss", float(number), number, number) for number in range(25_000)]
    plain.run("r1", params=params, tags=params, points=points)

    report = light_platform.import_runs(plain.path)

    assert (counts(report)["params"], counts(report)["tags"], counts(report)["points"]) == (
        2_500,
        2_500,
        25_000,
    )


def test_a_run_that_is_refused_does_not_keep_others_back(
    light_platform: OwnPlatform, plain: MlflowFixture
) -> None:
    plain.run("r1", params={f"p{number}": "1" for number in range(10_001)}, points=[("auc", 1.0, 0, 0)])
    plain.run("r2", points=[("auc", 1.0, 0, 10**17)])  # the year 3 million
    plain.run("r3", points=[("auc", 1.0, 0, 0)])

    report = light_platform.import_runs(plain.path)

    assert not report.complete
    assert any("r1" in problem and "10001" in problem for problem in report.problems)
    assert any("date" in note for note in report.notes)
    assert [each.here for each in report.counts if each.what == "points"] == [1]
    assert details(light_platform, "r3").metrics[0].points == 1


@pytest.mark.parametrize(
    "uri", ["/etc", "file:///etc", "../../etc", "mlruns/1/../../../secret", "s3://bucket/1/r1/artifacts"]
)
def test_artifacts_are_read_beside_the_database_only(
    light_platform: OwnPlatform, plain: MlflowFixture, uri: str
) -> None:
    (plain.folder.parent / "secret").mkdir()
    (plain.folder.parent / "secret" / "key").write_text("secret")
    plain.run("r1", uri=uri)

    report = light_platform.import_runs(plain.path)

    assert details(light_platform, "r1").artifacts == ()
    assert counts(report)["artifacts"] == 0


def test_links_among_artifacts_are_not_followed(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    outside = plain.folder.parent / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    plain.run("r1", files={"a.txt": b"a"})
    plain.run("r2")
    folder = plain.folder / "mlruns" / "1"
    os.symlink(outside / "key", folder / "r1" / "artifacts" / "link")
    os.symlink(outside, folder / "r1" / "artifacts" / "folder")
    (folder / "r2").mkdir()
    os.symlink(outside, folder / "r2" / "artifacts")

    report = light_platform.import_runs(plain.path)

    assert [each.path for each in details(light_platform, "r1").artifacts] == ["a.txt"]
    assert details(light_platform, "r2").artifacts == ()
    assert any("not followed" in note for note in report.notes)


def test_a_root_of_artifacts_can_be_named(
    light_platform: OwnPlatform, plain: MlflowFixture, tmp_path: Path
) -> None:
    copy = tmp_path / "bucket" / "1" / "r1" / "artifacts" / "model"
    copy.mkdir(parents=True)
    (copy / "weights").write_bytes(b"w")
    plain.run("r1", uri="s3://bucket/prefix/1/r1/artifacts")

    without = light_platform.import_runs(plain.path)
    named = light_platform.import_runs(plain.path, artifacts=tmp_path / "bucket")

    assert any("s3://bucket" in note for note in without.notes)
    assert named.complete
    assert named.changed_runs == 1
    assert [each.path for each in details(light_platform, "r1").artifacts] == ["model/weights"]


def test_a_parent_that_is_missing_or_a_circle_does_not_matter(
    light_platform: OwnPlatform, plain: MlflowFixture
) -> None:
    plain.run("orphan", tags={PARENT: "nobody"})
    plain.run("self", tags={PARENT: "self"})
    plain.run("a", tags={PARENT: "b"})
    plain.run("b", tags={PARENT: "a"})

    report = light_platform.import_runs(plain.path)

    assert counts(report)["runs"] == 4
    assert sum(run.parent is None for run in runs_of(light_platform).values()) >= 3


def test_logged_models_are_copied_with_their_files_metrics_and_runs(
    platform: OwnPlatform, plain: MlflowFixture
) -> None:
    plain.run("r1", points=[("auc", 0.9, 1, 2), ("loss", math.nan, 1, 2)])
    plain.run("r2", stage="deleted", points=[("auc", 0.9, 1, 2)])
    plain.model("m-1", run="r1", files={"MLmodel": b"flavors", "data/model.bin": bytes(2_000_000)})
    plain.model("m-2", run="r2", stage="deleted", files={})

    report = platform.import_runs(plain.path)
    again = platform.import_runs(plain.path)

    found = {each.name: each for each in platform.loggedmodels.list(view="all").items}
    first = found["m-1 model"]
    run = details(platform, "r1")
    assert report.complete, report
    assert (counts(report)["logged models"], counts(report)["artifacts"], counts(report)["params"]) == (
        2,
        2,
        2,
    )
    assert (again.complete, again.new_runs, again.changed_runs) == (True, 0, 0)
    assert len(found) == 2
    assert found["m-2 model"].deleted_at is not None
    assert (first.status, first.type, first.source_run) == ("ready", "agent", run.run.id)
    assert [(each.key, str(each.value), each.dataset) for each in first.metrics] == [
        ("auc", "0.9", "trips"),
        ("loss", "nan", "trips"),
    ]
    assert [each.model for each in run.models_made] == [first.id]
    assert [each.points for each in run.metrics] == [1, 1]
    assert b"".join(platform.loggedmodels.read_artifact(first.id, "MLmodel")) == b"flavors"


def test_a_logged_model_that_was_not_finished_is_completed(
    light_platform: OwnPlatform, plain: MlflowFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.run("r1", points=[("auc", 0.9, 1, 2)])
    plain.model("m-1", run="r1", files={"MLmodel": b"flavors"})
    attempts = 0
    report = None
    while report is None:
        attempts += 1
        with monkeypatch.context() as patch:
            lose_an_answer(light_platform, patch, number=attempts)
            try:
                report = light_platform.import_runs(plain.path)
            except Unavailable:
                assert attempts < 20

    (found,) = light_platform.loggedmodels.list(view="all").items
    assert attempts > 3
    assert report.complete, report
    assert found.status == "ready"
    assert found.metrics[0].value == 0.9


# ------------------------------------------------------------------------------------------- bad input


def refusal(platform: OwnPlatform, source: Path | str, **options: Any) -> FalajError:
    with pytest.raises(FalajError) as caught:
        platform.import_runs(source, **options)
    assert platform.experiments.list(view="all").items == ()
    return caught.value


def test_files_that_are_no_database_of_mlflow_are_refused(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    text, other, empty = tmp_path / "a.txt", tmp_path / "other.db", tmp_path / "empty.db"
    text.write_text("hello")
    empty.write_bytes(b"")
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE runs (id)")
    database.close()

    assert isinstance(refusal(light_platform, text), InvalidInput)
    assert "no table experiments" in str(refusal(light_platform, other))
    assert isinstance(refusal(light_platform, empty), InvalidInput)
    assert isinstance(refusal(light_platform, tmp_path / "nothing.db"), InvalidInput)
    assert isinstance(refusal(light_platform, tmp_path), InvalidInput)
    assert "no SQLite" in str(refusal(light_platform, text, kind="mlflow"))
    assert "mlflow or wandb" in str(refusal(light_platform, text, kind="comet"))


def test_a_view_in_place_of_a_table_is_refused(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    plain.sql("DROP TABLE params", [()])
    plain.sql("CREATE VIEW params AS SELECT 'k' AS key, 'v' AS value, 'r' AS run_uuid", [()])

    assert "no table params" in str(refusal(light_platform, plain.path))


def test_a_half_copied_database_is_refused(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    plain.run("r1", points=[("loss", 1.0, number, number) for number in range(5_000)])
    data = plain.path.read_bytes()

    plain.path.write_bytes(data[: len(data) // 2])
    cut = refusal(light_platform, plain.path)
    plain.path.write_bytes(data[: len(data) // 4] + bytes(len(data) // 2) + data[len(data) * 3 // 4 :])

    with pytest.raises((Damaged, InvalidInput)):
        light_platform.import_runs(plain.path)
    assert "pages" in str(cut)
    assert ".backup" in str(cut)


def test_a_locked_database_is_said_to_be_locked(
    light_platform: OwnPlatform, plain: MlflowFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_file, "LOCKED_S", 0.1)
    holder = sqlite3.connect(plain.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    found = refusal(light_platform, plain.path)

    holder.close()
    assert isinstance(found, Unavailable)
    assert "locked" in str(found)


def test_the_database_is_not_changed(light_platform: OwnPlatform, mlflow: MlflowFixture) -> None:
    before = mlflow.path.read_bytes()

    light_platform.import_runs(mlflow.path)

    assert mlflow.path.read_bytes() == before
    assert sorted(each.name for each in mlflow.folder.iterdir()) == ["mlflow.db", "mlruns"]


def test_values_of_other_types_than_mlflow_writes(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    plain.run("r1", status="ODD", params={"a": b"\xff\xfe"}, points=[("ok", 1.0, 0, 0)])  # type: ignore[dict-item]
    plain.sql(
        "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, 0)",
        [
            ("text", "abc", STARTED, "r1", 0),
            ("when", 1.0, "soon", "r1", 0),
            ("step", 1.0, STARTED, "r1", 0.5),
        ],
    )

    report = light_platform.import_runs(plain.path)

    found = details(light_platform, "r1")
    assert not report.complete  # three points are no points
    assert [each.key for each in found.metrics] == ["ok"]
    assert found.run.status == "failed"


def test_a_caller_without_rights_copies_nothing(light_platform: OwnPlatform, mlflow: MlflowFixture) -> None:
    viewer = light_platform.join("vera", Role.VIEWER)

    with acting_as(viewer), pytest.raises(Denied):
        light_platform.import_runs(mlflow.path)

    assert light_platform.experiments.list(view="all").items == ()


def test_a_developer_can_import_and_each_run_is_in_the_audit_log(
    light_platform: OwnPlatform, mlflow: MlflowFixture
) -> None:
    developer = light_platform.join("dev", Role.DEVELOPER)

    with acting_as(developer):
        report = light_platform.import_runs(mlflow.path)

    started = [entry for entry in light_platform.entries() if entry["action"] == "runs.start"]
    assert report.complete
    assert len(started) == 4
    assert {entry["caller"] for entry in started} == {"dev"}


def test_two_imports_at_once_make_each_run_once(
    light_platform: OwnPlatform, plain: MlflowFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one runs whole before the first starts its first run, of which it does not know."""
    plain.run("r1", points=[("auc", 1.0, 0, 0)])
    light_platform.import_runs(plain.path, experiments=["churn"], with_files=False)
    plain.run("r2", points=[("auc", 1.0, 0, 0)])
    inner: list[ImportReport] = []
    start = importer.RunImport._start

    def late(self: Any, fitted: Any) -> str:
        if not inner:
            monkeypatch.setattr(importer.RunImport, "_start", start)
            inner.append(light_platform.import_runs(plain.path))
        return start(self, fitted)

    monkeypatch.setattr(importer.RunImport, "_start", late)

    outer = light_platform.import_runs(plain.path)

    assert inner[0].complete
    assert outer.complete
    assert sorted(runs_of(light_platform)) == ["r1", "r2"]
    assert len(light_platform.runs.list(view="all").items) == 2


def test_progress_counts_runs_and_points(light_platform: OwnPlatform, plain: MlflowFixture) -> None:
    from contextlib import contextmanager

    from falaj.sdk.run_import.sources import import_runs

    plain.run("r1", points=[("loss", 1.0, number, 0) for number in range(2_500)])
    totals: list[int | None] = []
    done: list[int] = []

    @contextmanager
    def watch(rows: int | None) -> Iterator[Any]:
        totals.append(rows)
        yield done.append

    import_runs(light_platform, plain.path, watch=watch)

    assert totals == [2_501]
    assert sum(done) == 2_501
    assert len(done) > 1
