"""Artifacts of runs and files of logged models: paths, replacement, deletion, and who may read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from falaj.errors import Conflict, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.tracking import DatasetInput, MetricPoint, ModelLink
from falaj.tracking.service import Runs
from model_servers import constant
from platforms import OwnPlatform


@pytest.fixture
def run(runs: Runs) -> str:
    return runs.start("churn").id


def put(runs: Runs, run: str, path: str, data: bytes = b"bytes") -> str:
    return runs.upload_artifact(run, path, iter([data])).blob


def read(runs: Runs, run: str, path: str, **part: int) -> bytes:
    return b"".join(runs.read_artifact(run, path, **part))


def test_artifacts_are_listed_by_folder_in_pages(runs: Runs, run: str) -> None:
    for path in ("model/MLmodel", "model/data/a.bin", "notes.txt", "Model/x"):
        put(runs, run, path)

    def entries(folder: str = "") -> list[tuple[str, bool, int | None]]:
        found = runs.artifacts(run, folder=folder).items
        return [(each.path, each.is_folder, each.size_bytes) for each in found]

    assert entries() == [("Model", True, None), ("model", True, None), ("notes.txt", False, 5)]
    assert entries("model") == [("model/MLmodel", False, 5), ("model/data", True, None)]
    assert entries("mod") == entries("notes.txt") == []
    first = runs.artifacts(run, limit=2)
    assert [each.path for each in runs.artifacts(run, limit=2, after=first.next).items] == ["notes.txt"]


def test_an_upload_replaces_the_file_and_its_bytes_go(platform: OwnPlatform, runs: Runs, run: str) -> None:
    first = put(runs, run, "a.txt", b"one")

    second = put(runs, run, "a.txt", b"second")

    assert read(runs, run, "a.txt") == b"second"
    assert read(runs, run, "a.txt", offset=1, length=3) == b"eco"
    with pytest.raises(NotFound):
        platform.get(first)
    assert run in {node.id for node in platform.lineage.graph(second)}
    assert platform.verify_audit(deep=True).ok


def test_a_file_is_no_folder(runs: Runs, run: str) -> None:
    put(runs, run, "a/b")

    for path in ("a", "a/b/c"):
        with pytest.raises(Conflict):
            put(runs, run, path)
    put(runs, run, "A")
    with pytest.raises(InvalidInput):
        put(runs, run, "../up")


def test_a_folder_is_deleted_with_its_files_and_named_blobs_stay(
    platform: OwnPlatform, runs: Runs, run: str
) -> None:
    own = put(runs, run, "plots/a.png")
    named = platform.put("roc", b"x", sources=(run,)).id
    runs.log_artifact(run, "plots/roc.png", "roc")
    put(runs, run, "plots.txt")

    gone = runs.delete_artifact(run, "plots")

    assert gone.paths == ("plots/a.png", "plots/roc.png")
    assert platform.get(named) == b"x"
    assert [each.path for each in runs.show(run).artifacts] == ["plots.txt"]
    with pytest.raises(NotFound):
        platform.get(own)
    with pytest.raises(NotFound):
        runs.delete_artifact(run, "plots")


@pytest.mark.parametrize("ends", ["deleted", "replaced", "cleaned up"])
def test_what_a_model_version_consists_of_outlives_the_artifact(
    platform: OwnPlatform, runs: Runs, run: str, tmp_path: Path, ends: str
) -> None:
    content = constant(tmp_path / "m.onnx", 3.0).read_bytes()
    stored = runs.upload_artifact(run, "model.onnx", iter([content])).blob
    version = platform.models.register("churn", files=(stored,), paths=("model.onnx",), run=run)

    if ends == "deleted":
        runs.delete_artifact(run, "model.onnx")
    elif ends == "replaced":
        runs.upload_artifact(run, "model.onnx", iter([b"other"]))
    else:
        runs.delete(run)
        platform.clock.advance(timedelta(days=31))
        assert runs.cleanup().runs == 1

    assert b"".join(platform.models.read(version.id, "model.onnx")) == content


def test_a_blob_that_two_runs_have_goes_with_neither_of_them(
    platform: OwnPlatform, runs: Runs, run: str
) -> None:
    stored = runs.upload_artifact(run, "plot.svg", iter([b"<svg/>"])).blob
    other = runs.start("trees", sources=(stored,)).id
    runs.log_artifact(other, "plot.svg", stored)

    runs.delete_artifact(run, "plot.svg")

    assert b"".join(runs.read_artifact(other, "plot.svg")) == b"<svg/>"


def test_strangers_neither_read_nor_write(platform: OwnPlatform, runs: Runs, run: str) -> None:
    put(runs, run, "a.txt")
    platform.workspaces.create("risk")

    with acting_as(platform.join("sam", Role.DEVELOPER, workspace="risk")):
        for call in (
            lambda: read(runs, run, "a.txt"),
            lambda: put(runs, run, "b.txt"),
            lambda: runs.artifacts(run),
            lambda: runs.delete_artifact(run, "a.txt"),
        ):
            with pytest.raises(NotFound):
                call()
    runs.delete(run)
    with pytest.raises(Conflict, match="deleted"):
        put(runs, run, "b.txt")


# ----------------------------------------------------------------------------------------- logged models


def test_a_logged_model_has_files_parameters_and_metrics(platform: OwnPlatform, runs: Runs, run: str) -> None:
    models = platform.loggedmodels
    model = models.create("churn", name="forest", source_run=run, params={"trees": 10}, tags={"a": "b"}).id
    models.upload_artifact(model, "MLmodel", iter([b"flavors: {}"]))
    on_set = {"model": model, "dataset": "d", "dataset_digest": "1"}
    runs.log_metrics(
        run,
        [MetricPoint(key="auc", value=value, step=step, **on_set) for step, value in ((2, 0.9), (1, 0.1))],
    )
    runs.log_metrics(run, [MetricPoint(key="auc", value=math.nan, model=model)])
    runs.log_outputs(run, (ModelLink(model=model, step=3),))
    runs.log_inputs(run, datasets=(DatasetInput(name="d", digest="1"),), models=(ModelLink(model=model),))

    ready = models.finalize(model)

    assert (ready.status, ready.source_run, ready.params[0].value) == ("ready", run, "10")
    assert [
        (each.key, each.dataset, repr(each.value)) for each in sorted(ready.metrics, key=lambda m: m.step)
    ] == [
        ("auc", None, "nan"),
        ("auc", "d", "0.9"),
    ]
    assert b"".join(models.read_artifact(model, "MLmodel")) == b"flavors: {}"
    shown = runs.show(run)
    assert [(each.model, each.step) for each in shown.models_made] == [(model, 3)]
    assert [each.model for each in shown.models_read] == [model]
    assert run in {node.id for node in platform.lineage.graph(model)}


def test_logged_models_are_searched_deleted_and_restored(platform: OwnPlatform, runs: Runs, run: str) -> None:
    models = platform.loggedmodels
    good, bad = (models.create("churn", name=name, params={"depth": name}).id for name in ("good", "bad"))
    for model, value in ((good, 0.9), (bad, 0.1)):
        runs.log_metrics(run, [MetricPoint(key="auc", value=value, model=model)])

    def found(where: str = "", **options: object) -> list[str]:
        return [each.name for each in models.list(experiments=("churn",), where=where, **options).items]

    assert found("metrics.auc > 0.5") == ["good"]
    assert found("params.depth = 'bad' and name LIKE 'b%'") == ["bad"]
    assert found(order_by=("metrics.auc DESC",)) == ["good", "bad"]
    models.delete(good)
    assert (found(), found(view="deleted")) == (["bad"], ["good"])
    with pytest.raises(Conflict, match="deleted"):
        models.finalize(good)
    models.restore(good)
    assert found() == ["bad", "good"]


def test_what_an_importer_sets_is_kept(runs: Runs) -> None:
    began, ended = datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC)
    run = runs.start("old", started_at=began, user="dana", status="scheduled").id

    done = runs.update(run, status="finished", ended_at=ended)

    assert (done.started_at, done.ended_at, done.user, done.status) == (began, ended, "dana", "finished")
    with pytest.raises(InvalidInput):
        runs.start("old", status="failed")


def table_bytes(rows: int, form: str) -> bytes:
    table = pa.table({"n": list(range(rows)), "name": [f"<b>{'x' * 300}" for _ in range(rows)]})
    sink = pa.BufferOutputStream()
    if form == "parquet":
        parquet.write_table(table, sink, row_group_size=max(rows // 3, 1))
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("form", "total"), [("parquet", 100_001), ("arrow", None)])
def test_the_first_rows_of_a_table_are_shown_as_text(
    platform: OwnPlatform, runs: Runs, run: str, form: str, total: int | None
) -> None:
    put(runs, run, f"rows.{form}", table_bytes(100_001, form))

    found = platform.runs.preview_artifact(run, f"rows.{form}", rows=3)

    assert (found.columns, found.total_rows) == (("n", "name"), total)
    assert [row[0] for row in found.rows] == ["0", "1", "2"]
    assert len(found.rows[0][1] or "") == 201


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1" + bytes(200) + b"PAR1", b"ARROW1\0\0" + bytes(99), b"a,b"]
)
def test_bytes_that_are_no_table_are_refused_in_words(
    platform: OwnPlatform, runs: Runs, run: str, data: bytes
) -> None:
    put(runs, run, "rows.parquet", data)

    with pytest.raises(InvalidInput, match=r"rows\.parquet"):
        platform.runs.preview_artifact(run, "rows.parquet")


def test_a_preview_is_for_those_who_may_see_the_run(platform: OwnPlatform, runs: Runs, run: str) -> None:
    put(runs, run, "rows.parquet", table_bytes(3, "parquet"))
    stranger = platform.join("stranger")

    with acting_as(stranger), pytest.raises(NotFound):
        platform.runs.preview_artifact(run, "rows.parquet")
