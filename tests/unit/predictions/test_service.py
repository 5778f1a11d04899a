"""The operation predictions.start: who may, what is pinned, and where the predictions come from."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import falaj as fj
from batch_runs import SIGNATURE, customers, linear_model, scores
from command_line import CommandLine, command_line
from falaj.control.workflows.store import work_row
from falaj.errors import AlreadyExists, Denied, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.sdk.platform import Platform
from model_files import catboost
from platforms import OwnPlatform

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def register(platform: Platform, **options: Any) -> str:
    """Register the linear model, and return the reference of its version."""
    file = platform.blobs.upload(iter([linear_model()]), **options)
    return platform.models.register(
        "churn", files=(file.id,), paths=("model.onnx",), inputs=SIGNATURE
    ).reference


def parquet(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows, sink)
    return sink.getvalue()


def input_of(platform: OwnPlatform, work: WorkflowRun) -> Any:
    with platform.database.read() as tx:
        return work_row(tx, work.id).input


def test_the_version_behind_an_alias_is_pinned_when_the_prediction_starts(platform: OwnPlatform) -> None:
    register(platform)
    platform.models.promote("churn@1", to="champion")
    platform.put("rows", parquet(customers(5)))

    work = platform.predictions.start("churn@champion", data="blob:rows", name="scores")
    register(platform)
    platform.models.promote("churn@2", to="champion")

    assert work.workflow == "predictions.start"
    assert input_of(platform, work)["model"] == platform.models.version("churn@1").id
    assert input_of(platform, work)["run"]["model"] == "churn@1"


def test_predicting_needs_the_right_to_read_the_model_and_the_rows(platform: OwnPlatform) -> None:
    register(platform)
    platform.put("rows", parquet(customers(5)))
    platform.workspaces.create("secret")
    platform.put("hidden", parquet(customers(5)), workspace="secret")
    viewer = platform.join("vera", Role.VIEWER)
    developer = platform.join("dina", Role.DEVELOPER)

    with acting_as(viewer), pytest.raises(Denied):
        platform.predictions.start("churn@1", data="blob:rows", name="scores")
    with acting_as(developer), pytest.raises(NotFound):
        platform.predictions.start("churn@1", data="secret/blob:hidden", name="scores")
    with acting_as(developer):
        work = platform.predictions.start("churn@1", data="blob:rows", name="scores")

    assert work.state is WorkflowState.WAITING
    assert platform.entries()[-1]["action"] == "predictions.start"


def test_what_cannot_be_predicted_is_refused_before_a_job_starts(platform: OwnPlatform) -> None:
    register(platform)
    platform.put("rows", parquet(customers(5)))
    tree = platform.blobs.upload(iter([catboost()]))
    platform.models.register("tree", files=(tree.id,), paths=("model.cbm",))

    with pytest.raises(AlreadyExists, match="'rows'"):
        platform.predictions.start("churn@1", data="blob:rows", name="rows")
    with pytest.raises(InvalidInput, match="a view, a training set or a Parquet blob"):
        platform.predictions.start("churn@1", data="model:churn", name="scores")
    with pytest.raises(InvalidInput, match="one file of these formats"):
        platform.predictions.start("tree@1", data="blob:rows", name="scores")


# ------------------------------------------------------------------------------------------ with a job


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    with command_line(tmp_path, capsys) as made:
        yield made


def ended(platform: Platform, work: WorkflowRun) -> WorkflowRun:
    *_, last = platform.workflows.watch(work.id)
    return last


def customers_view(*features: str) -> tuple[Entity, FeatureView]:
    columns = tuple(Feature(name=name, type=ColumnType.FLOAT) for name in features)
    entity = Entity(name="customer", key="id", type=ColumnType.INTEGER)
    return entity, FeatureView(name="customers", entities=("customer",), columns=columns)


@pytest.mark.slow
def test_a_job_predicts_a_view_into_a_blob_and_into_another_view(falaj: CommandLine) -> None:
    entity, view = customers_view("age", "income", "calls")
    scored = view.model_copy(
        update={"name": "scored", "columns": (Feature(name="score", type=ColumnType.FLOAT),)}
    )
    rows = customers(500)
    at = pa.array([NOON + timedelta(seconds=n) for n in range(500)], pa.timestamp("us", tz="UTC"))

    with fj.open(falaj.home) as platform:
        platform.features.apply(entities=(entity,), views=(view, scored))
        platform.ingest("customers", rows.append_column("event_time", at))
        register(platform, classes=("personal",))
        work = platform.predict("churn@1", "view:customers", "scores", into="scored")
        last = ended(platform, work)
        made = pq.read_table(io.BytesIO(platform.get("scores")))
        stored = platform.features.scan("scored").read_all()
        label = platform.blobs.show("scores").label
        origins = {node.name for node in platform.lineage.graph("blob:scores", direction=Direction.UP)}

    assert last.state is WorkflowState.DONE, last.error
    assert np.array_equal(made.sort_by("id")["score"].to_numpy(), scores(rows))
    assert np.allclose(stored.sort_by("id")["score"].to_numpy(), scores(rows))
    assert label.classes == {"personal"}
    assert {"churn@1", "customers"} <= origins


@pytest.mark.slow
def test_a_job_that_fails_says_why_and_the_model_stays_as_it_was(falaj: CommandLine) -> None:
    bad = customers(5).drop_columns(["age"])

    with fj.open(falaj.home) as platform:
        register(platform)
        before = platform.models.version("churn@1")
        last = ended(platform, platform.predict("churn@1", bad, "scores"))
        after = platform.models.version("churn@1")
        (job,) = platform.jobs.list().items
        log = b"".join(platform.jobs.logs(job.id)).decode()

    assert last.state is WorkflowState.FAILED
    assert job.id in str(last.error)
    assert "column age" in log
    assert after == before
    with fj.open(falaj.home) as platform, pytest.raises(NotFound):
        platform.blobs.show("scores")


# ------------------------------------------------------------------------------------------ the command


@pytest.mark.slow
def test_the_command_predicts_files_here_and_tables_on_the_platform(
    falaj: CommandLine, tmp_path: Path
) -> None:
    rows = customers(1000)
    pq.write_table(rows, tmp_path / "in.parquet")
    with fj.open(falaj.home) as platform:
        register(platform)
        platform.models.promote("churn@1", to="champion")

    here = falaj.done("predict", "churn@champion", "in.parquet", "out.parquet", "--keep", "id,age")
    again = falaj("predict", "churn@champion", "in.parquet", "out.parquet")
    missing = falaj("predict", "churn@champion", "customers", "out2.parquet")
    unknown = falaj("predict", "churn@9", "in.parquet", "out2.parquet")
    job = falaj.done("predict", "churn@champion", "in.parquet", "scores", "--job", "--prefix", "p_")

    made = pq.read_table(tmp_path / "out.parquet")
    assert made.column_names == ["id", "age", "score"]
    assert np.array_equal(made["score"].to_numpy(), scores(rows))
    assert here.out.startswith("out.parquet has the predictions of 1000 rows: id, age, score")
    assert (again.status, missing.status, unknown.status) == (1, 1, 1)
    assert "--overwrite" in again.err
    assert "view:customers" in missing.err
    assert "blob scores" in job.out
    with fj.open(falaj.home) as platform:
        stored = pq.read_table(io.BytesIO(platform.get("scores")))
    assert stored.column_names == ["id", "p_score"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet"]
