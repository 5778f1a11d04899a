"""Events as OpenLineage: they parse into the classes of openlineage-python, and name columns and nobody else's data."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openlineage.client.event_v2 import RunEvent, RunState

import falaj as fj
from batch_runs import SIGNATURE, customers, linear_model
from falaj.assembly.model_server import service_caller
from falaj.errors import Conflict, Denied, InvalidInput
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowEnd
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.names import new_id
from falaj.sdk.platform import Platform
from falaj.serving.service import MODEL_SERVER
from model_files import onnx
from openlineage_events import all_events, names, parse
from platforms import OwnPlatform
from webhook_receivers import Deliveries, Receiver

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def received(receiver: Receiver) -> list[RunEvent]:
    return [parse(body) for _, body in receiver.got]


def make_training_set(platform: Platform) -> str:
    """Make the view `usage` and the training set `churn-train` of it; return the set."""
    view = FeatureView(
        name="usage",
        entities=("customer",),
        columns=(
            Feature(name="calls", type=ColumnType.INTEGER),
            Feature(name="minutes", type=ColumnType.FLOAT),
        ),
    )
    entity = Entity(name="customer", key="customer_id", type=ColumnType.INTEGER)
    platform.features.apply(entities=(entity,), views=(view,))
    keys = pa.table({"customer_id": [1, 2], "event_time": [NOON, NOON]})
    rows = keys.append_column("calls", pa.array([1, 2])).append_column("minutes", pa.array([0.5, 1.5]))
    platform.ingest("usage", rows)
    return platform.training_set("churn-train", spine=keys, views=["usage"]).id


def test_runs_and_training_sets_arrive_with_their_columns(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("lineage", receiver.url, written_as="openlineage")
    data = make_training_set(sending)
    run = sending.runs.start("churn", sources=(data,))
    sending.runs.end(run.id, status="failed")
    blob = sending.blobs.upload(iter([onnx()]))
    sending.models.register("churn", files=(blob.id,), paths=("m.onnx",), training_set=data, run=run.id)
    sending.secrets.set("pin", "4711")

    for _ in range(3):
        deliveries.run()

    found = received(receiver)
    assert {headers["content-type"] for headers, _ in receiver.got} == {"application/json; charset=utf-8"}
    by_job = {each.job.name: each for each in found}
    made = by_job["features.training_set"]
    (output,) = made.outputs or []
    assert output.name.endswith("/dataset/churn-train")
    lineage = output.facets["columnLineage"].fields["usage__minutes"].inputFields[0]
    assert (lineage.field, lineage.name.partition("/")[2]) == ("minutes", "view/usage")
    assert "view/usage" in names(made.inputs)
    assert "usage__calls" in [each.name for each in output.facets["schema"].fields]
    started, ended = [each for each in found if each.job.name.startswith("runs.")]
    assert (started.eventType, ended.eventType) == (RunState.START, RunState.FAIL)
    assert started.run.runId == ended.run.runId
    assert names(started.inputs) == ["dataset/churn-train"]
    registered = by_job["models.register"]
    assert "model_version/churn@1" in names(registered.outputs)
    assert "dataset/churn-train" in names(registered.inputs)
    assert "secrets.set" not in by_job
    assert sending.webhooks.show("lineage").waiting == 0


def test_lineage_goes_to_the_column(sending: OwnPlatform) -> None:
    make_training_set(sending)
    spine, _, *origins = sending.features.column_lineage("churn-train")

    assert (spine.column, spine.view, spine.expression) == ("customer_id", None, None)
    assert [(each.column, each.view, each.view_version, each.field) for each in origins] == [
        ("usage__calls", "usage", 1, "calls"),
        ("usage__minutes", "usage", 1, "minutes"),
    ]


def test_a_receiver_is_tried_with_an_event_of_its_format(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("lineage", receiver.url, written_as="openlineage")
    sending.webhooks.test("lineage")

    deliveries.run()

    (event,) = received(receiver)
    assert (event.eventType, event.job.name) == (RunState.OTHER, "webhooks.test")


def test_of_other_workspaces_the_ids_alone_are_told(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.workspaces.create("clinic")
    secret = sending.put("patients-of-one-ward", b"x", workspace="clinic")
    sending.webhooks.create("lineage", receiver.url, written_as="openlineage")
    sending.runs.start("churn", sources=(secret.id,))

    deliveries.run()

    (event,) = received(receiver)
    assert names(event.inputs) == [f"blob/{secret.id}"]
    assert not any(b"patients" in body for _, body in receiver.got)


def test_nothing_leaves_for_an_address_that_is_not_allowed(sending: OwnPlatform) -> None:
    with pytest.raises((InvalidInput, Denied)):
        sending.webhooks.create(
            "lineage", "https://lineage.example.com/api/v1/lineage", written_as="openlineage"
        )
    with pytest.raises(InvalidInput):
        sending.webhooks.create("lineage", "https://127.0.0.1/x", written_as="OpenLineage")
    with acting_as(sending.join("dev", Role.DEVELOPER)), pytest.raises(Denied):
        sending.webhooks.create("lineage", "https://127.0.0.1/x", written_as="openlineage")


@pytest.mark.slow
def test_a_job_starts_with_its_inputs_and_ends_with_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(
        "import os, pathlib\npathlib.Path(os.environ['FALAJ_OUTPUTS'], 'a.txt').write_text('a')\n"
    )
    with fj.open(tmp_path / "home") as platform:
        make_training_set(platform)
        submitted = platform.train(script, inputs={"training": "churn-train"})
        *_, job = platform.jobs.wait(submitted.id)
        found = all_events(platform, job.workspace)

    ran = [each for each in found if each.job.name.startswith("jobs.") and each.job.name != "jobs.submit"]
    assert [each.eventType for each in ran] == [RunState.START, RunState.COMPLETE]
    assert len({each.run.runId for each in ran}) == 1
    assert "dataset/churn-train" in names(ran[0].inputs)
    outputs = {job.outputs[0].blob, job.run}
    assert outputs & {name.rpartition("/")[2] for name in names(ran[1].outputs)}


# ------------------------------------------------------------------------------------------ predictions


def register_linear(platform: Platform) -> None:
    file = platform.blobs.upload(iter([linear_model()]))
    platform.models.register("churn", files=(file.id,), paths=("model.onnx",), inputs=SIGNATURE)


def put_customers(platform: Platform) -> None:
    sink = io.BytesIO()
    pq.write_table(customers(50), sink)
    platform.put("customers", sink.getvalue())


def of_batches(found: list[RunEvent]) -> list[RunEvent]:
    return [each for each in found if each.job.name == "predictions.start"]


@pytest.mark.slow
def test_a_batch_prediction_starts_with_its_inputs_and_ends_with_its_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with fj.open(tmp_path / "home") as platform:
        register_linear(platform)
        put_customers(platform)
        platform.put("garbage", b"no rows at all")
        *_, done = platform.workflows.watch(platform.predict("churn@1", "blob:customers", "scores").id)
        *_, failed = platform.workflows.watch(platform.predict("churn@1", "blob:garbage", "none").id)
        found = all_events(platform, done.workspace)

    assert (done.state, failed.state) == ("done", "failed"), (done.error, failed.error)
    started, completed, started_again, ended = of_batches(found)
    assert [started.eventType, completed.eventType] == [RunState.START, RunState.COMPLETE]
    assert [started_again.eventType, ended.eventType] == [RunState.START, RunState.FAIL]
    assert started.run.runId == completed.run.runId != ended.run.runId == started_again.run.runId
    assert names(completed.inputs) == ["blob/customers", "model_version/churn@1"] == names(started.inputs)
    assert (names(completed.outputs), names(ended.outputs)) == (["blob/scores"], [])


def test_a_cancelled_batch_prediction_is_aborted(sending: OwnPlatform) -> None:
    register_linear(sending)
    put_customers(sending)
    work = sending.predictions.start("churn@1", data="blob:customers", name="scores")

    with sending.as_controller():
        sending.workflows.finish(work.id, end=WorkflowEnd(state="cancelled", error="cancelled"))

    found = of_batches(all_events(sending, work.workspace))
    assert [each.eventType for each in found] == [RunState.START, RunState.ABORT]
    with sending.as_controller(), pytest.raises(Conflict, match="ended already"):
        sending.workflows.finish(work.id, end=WorkflowEnd(state="done", result={"blob": "x"}))


def test_the_end_of_other_work_says_nothing_of_data(sending: OwnPlatform) -> None:
    blob = sending.put("rows", b"rows")
    work = sending.blobs.copy(blob.id, zone="frankfurt", name="copied")

    with sending.as_controller():
        sending.workflows.finish(work.id, end=WorkflowEnd(state="done", result={"blob": blob.id}))

    found = all_events(sending, work.workspace)
    assert [each.job.name for each in found] == ["blobs.upload"]


def record_batches(platform: OwnPlatform, version: str, *, count: int, rows: int) -> None:
    with acting_as(service_caller(platform.parts.gate, MODEL_SERVER, Role.OPERATOR)):
        for _ in range(count):
            platform.endpoints.record(
                iter([b"a batch"]),
                endpoint="churn",
                batch=new_id("predictions"),
                rows=rows,
                version=version,
            )


def test_online_predictions_are_one_event_for_each_version_and_period(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    for _ in range(2):
        register_linear(sending)
    sending.endpoints.deploy("churn", model="churn@1")
    sending.webhooks.create("lineage", receiver.url, written_as="openlineage", types=("endpoints.predicted",))
    began = sending.clock.now
    record_batches(sending, "churn@1", count=30, rows=7)
    sending.clock.advance(timedelta(seconds=50))
    record_batches(sending, "churn@1", count=20, rows=7)
    record_batches(sending, "churn@2", count=1, rows=3)

    with sending.as_controller():
        told = sending.endpoints.announce()
    deliveries.run()

    assert (told.events, told.rows) == (2, 353)
    first, second = received(receiver)
    assert {each.eventType for each in (first, second)} == {RunState.COMPLETE}
    assert (first.job.name, first.run.runId == second.run.runId) == ("endpoint.churn", False)
    assert names(first.inputs) == ["endpoint/churn", "model_version/churn@1"]
    assert names(second.inputs) == ["endpoint/churn", "model_version/churn@2"]
    assert names(first.outputs) == ["predictions/churn"] == names(second.outputs)
    period = (first.run.facets or {})["nominalTime"]
    assert (period.nominalStartTime, period.nominalEndTime) == (
        began.isoformat(),
        (began + timedelta(seconds=50)).isoformat(),
    )
    statistics = [
        (each.outputs or [])[0].outputFacets["outputStatistics"].rowCount for each in (first, second)
    ]
    assert statistics == [350, 3]


def test_predictions_are_told_once_and_nothing_is_written_if_there_are_none(sending: OwnPlatform) -> None:
    register_linear(sending)
    sending.endpoints.deploy("churn", model="churn@1")
    record_batches(sending, "churn@1", count=2, rows=5)

    with sending.as_controller():
        assert sending.endpoints.announce().rows == 10
        before = len(sending.entries())
        assert sending.endpoints.announce().events == 0
        assert len(sending.entries()) == before
        record_batches(sending, "churn@1", count=1, rows=1)
        sending.endpoints.remove("churn")
        assert sending.endpoints.announce().rows == 1
