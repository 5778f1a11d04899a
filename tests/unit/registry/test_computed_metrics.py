"""Metrics that the platform computes on a pinned set: by a job, for gates that count no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper
from sklearn.metrics import accuracy_score, roc_auc_score

import falaj as fj
from batch_runs import NAMES, SIGNATURE, serialized
from falaj.assembly.evaluation.__main__ import evaluate
from falaj.control.workflows.store import work_row
from falaj.errors import Conflict, Denied, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.identity import Role
from falaj.records.models.gates import EvaluationReport, MetricMeasurement
from falaj.records.training.jobs import JobSpec
from falaj.sdk.platform import Platform
from labelled_sets import labelled, make_set
from platforms import OwnPlatform

GOOD, BAD = (1.0, 10.0, 100.0), (1.0, 0.0, 0.0)
RULE = "auc >= champion - 0.002"

Array = npt.NDArray[Any]


def logistic(weights: tuple[float, ...], *, bias: float = -300.0) -> bytes:
    """Return a model of the probability that a customer leaves."""
    matrix = np.array(weights, np.float32).reshape(3, 1) / 100
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["X", "W"], ["product"]),
            helper.make_node("Add", ["product", "b"], ["logit"]),
            helper.make_node("Sigmoid", ["logit"], ["probability"]),
        ],
        "logistic",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["rows", 3])],
        [helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["rows", 1])],
        [numpy_helper.from_array(matrix, "W"), numpy_helper.from_array(np.float32([bias / 100]), "b")],
    )
    return serialized(graph)


def probabilities(rows: pa.Table, weights: tuple[float, ...]) -> Array:
    matrix = np.column_stack([rows[name].to_numpy() for name in NAMES])
    return 1 / (1 + np.exp(-(matrix @ np.array(weights) - 300.0) / 100))


def register(platform: Platform, weights: tuple[float, ...], **options: Any) -> str:
    file = platform.blobs.upload(iter([logistic(weights)]))
    options = {"inputs": SIGNATURE, **options}
    return platform.models.register("churn", files=(file.id,), paths=("model.onnx",), **options).reference


def input_of(platform: OwnPlatform, work: WorkflowRun) -> Any:
    with platform.database.read() as tx:
        return work_row(tx, work.id).input


def report(
    platform: OwnPlatform, version: str, *, target: str = "churned", **metrics: float
) -> MetricMeasurement:
    """Record metrics as the controller does after a job."""
    job = platform.jobs.submit(JobSpec(name="evaluate", module="falaj.assembly.evaluation"))
    found = EvaluationReport(target=target, output="probability", metrics=metrics, rows=100)
    with platform.as_controller():
        return platform.models.record_evaluation(version, on="holdout", job=job.id, report=found)


@pytest.fixture
def ready(platform: OwnPlatform) -> OwnPlatform:
    """A champion, churn@1, a challenger, churn@2, and a labelled set."""
    make_set(platform, labelled(50))
    register(platform, GOOD), register(platform, BAD)
    platform.models.promote("churn@1", to="champion")
    return platform


# ------------------------------------------------------------------------------------------ a real job


@pytest.mark.slow
def test_a_job_computes_the_metrics_of_a_version_and_of_the_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a part has, so that the order of parts matters."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    rows = labelled(150_000)
    with fj.open(tmp_path / "home") as platform:
        data = make_set(platform, rows)
        register(platform, GOOD), register(platform, BAD, training_set=data)
        platform.models.promote("churn@1", to="champion")
        platform.models.set_gates("churn", alias="champion", metrics=(RULE,), on="holdout", target="churned")
        platform.models.record_metrics("churn@2", on="holdout", metrics={"auc": 0.9999})
        *_, ended = platform.workflows.watch(platform.models.evaluate("churn@2", on="holdout").id)
        assert ended.state is WorkflowState.DONE, ended.error
        found = {
            each["version"]: MetricMeasurement.model_validate(each) for each in ended.result["evaluations"]
        }
        checked = platform.models.check_gates("churn@2", alias="champion")
        card = platform.models.card("churn@2").markdown
        changes = {each.name: each for each in platform.models.diff("churn@1", "churn@2").metrics}
        outputs = platform.jobs.show(str(found["churn@2"].job)).outputs
        with pytest.raises(Conflict, match=r"churn@2 and churn@1 on holdout are computed already"):
            platform.models.evaluate("churn@2", on="holdout")

    known = rows.filter(rows["churned"].is_valid())
    target = known["churned"].to_numpy()
    for version, weights in (("churn@1", GOOD), ("churn@2", BAD)):
        predicted = probabilities(known, weights)
        assert found[version].metrics["auc"] == pytest.approx(roc_auc_score(target, predicted), abs=1e-6)
        assert found[version].metrics["accuracy"] == pytest.approx(accuracy_score(target, predicted > 0.5))
        assert (found[version].rows, found[version].skipped) == (149_850, 150)
        assert (found[version].target, found[version].output) == ("churned", "probability")
    (result,) = checked.results
    own, champion = result.sources
    assert (checked.passed, own.origin, champion.origin) == (False, "computed", "computed")
    assert (own.version, own.job, own.rows, own.seen) == ("churn@2", found["churn@2"].job, 149_850, True)
    assert (champion.value, champion.seen) == (found["churn@1"].metrics["auc"], False)
    assert "Metrics on holdout, computed for churned over 149850 rows" in card
    assert "Metrics on holdout, reported by" in card
    assert changes["auc on holdout, computed for churned"].difference < 0
    assert [each.path for each in outputs] == ["metrics.json"]


# --------------------------------------------------------------------------------------------- the gates


def test_a_gate_with_a_target_counts_computed_metrics_alone(ready: OwnPlatform) -> None:
    models = ready.models
    models.set_gates("churn", alias="champion", metrics=(RULE,), on="holdout", target="churned")
    for version in ("churn@1", "churn@2"):
        models.record_metrics(version, on="holdout", metrics={"auc": 0.99})
    report(ready, "churn@1", auc=0.9)

    with pytest.raises(Denied) as refused:
        models.promote("churn@2", to="champion")

    (fault,) = refused.value.faults
    assert fault.where == "gate auc >= champion - 0.002 on holdout, computed for churned"
    assert (fault.given, fault.allowed) == ("churn@2 has no computed auc", "a computed auc")
    assert fault.fix == "falaj models evaluate churn@2 --on holdout --target churned"
    report(ready, "churn@2", auc=0.95)
    (result,) = models.promote("churn@2", to="champion").change.evidence.gates
    assert [(each.version, each.value, each.origin) for each in result.sources] == [
        ("churn@2", 0.95, "computed"),
        ("churn@1", 0.9, "computed"),
    ]


def test_metrics_that_were_computed_for_another_column_do_not_count(ready: OwnPlatform) -> None:
    """Who chooses the column could choose one that is easy to predict."""
    ready.models.set_gates("churn", alias="champion", metrics=("auc >= 0.5",), on="holdout", target="churned")

    report(ready, "churn@2", target="calls", auc=1.0)

    assert not ready.models.check_gates("churn@2", alias="champion").passed


def test_an_approval_says_what_was_computed_and_what_was_reported(ready: OwnPlatform) -> None:
    noor = ready.join("noor", Role.APPROVER)
    ready.models.set_gates("churn", alias="champion", metrics=(RULE,), on="holdout")
    for version in ("churn@1", "churn@2"):
        ready.models.record_metrics(version, on="holdout", metrics={"auc": 0.9})
        report(ready, version, auc=0.8)
    with acting_as(noor):
        reported = ready.models.approve("churn@2", alias="champion")
    ready.models.set_gates("churn", alias="staging", metrics=(RULE,), on="holdout", target="churned")
    with acting_as(noor):
        computed = ready.models.approve("churn@2", alias="staging")

    origins = [
        {(each.origin, each.value, each.job is None) for gate in made.evidence.gates for each in gate.sources}
        for made in (reported, computed)
    ]
    assert origins == [{("reported", 0.9, True)}, {("computed", 0.8, False)}]
    (kept,) = ready.models.approvals("churn@2", alias="staging").items
    assert kept.evidence == computed.evidence


def test_what_was_computed_first_stays(ready: OwnPlatform) -> None:
    first = report(ready, "churn@2", auc=0.8)

    second = report(ready, "churn@2", auc=0.99)

    assert (first.on, first.metrics, second) == ("holdout", {"auc": 0.8}, first)
    assert [each.metrics for each in ready.models.card("churn@2").facts.measurements] == [{"auc": 0.8}]


def test_a_waiver_holds_for_what_was_found_whoever_measured_it(ready: OwnPlatform) -> None:
    ready.models.set_gates("churn", alias="champion", metrics=("auc >= 0.95",), on="holdout")
    ready.models.record_metrics("churn@2", on="holdout", metrics={"auc": 0.9})
    ready.models.waive_gates("churn@2", alias="champion", reason="the old one is worse")
    kept = (
        '[{"gate":"auc >= 0.95 on holdout","passed":false,"value":"auc 0.9","allowed":">= 0.95",'
        '"fix":"promote a version whose auc is higher","waived":false}]'
    )
    ready.sql("UPDATE registry_waivers SET gates = :kept", {"kept": kept})

    assert ready.models.promote("churn@2", to="champion").change.evidence.gates[0].waived


@pytest.mark.parametrize("wrong", [{"target": "churned"}, {"on": "holdout", "target": "churn"}], ids=str)
def test_gates_need_a_column_of_their_set(ready: OwnPlatform, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="target"):
        ready.models.set_gates("churn", alias="champion", metrics=(RULE,), **wrong)


# ------------------------------------------------------------------------------------------- the request


def test_the_champion_and_the_only_column_left_are_the_defaults(ready: OwnPlatform) -> None:
    models = ready.models

    given = input_of(ready, models.evaluate("churn@2", on="holdout"))
    alone = input_of(ready, models.evaluate("churn@2", on="holdout", against=None))
    report(ready, "churn@1", auc=0.9)
    rest = input_of(ready, models.evaluate("churn@2", on="holdout"))

    assert {run["model"] for run in given["runs"].values()} == {"churn@1", "churn@2"}
    assert {run["target"] for run in given["runs"].values()} == {"churned"}
    assert [run["model"] for run in alone["runs"].values()] == ["churn@2"]
    assert [run["model"] for run in rest["runs"].values()] == ["churn@2"]


def test_evaluating_needs_the_right_to_read_the_model_and_the_set(ready: OwnPlatform) -> None:
    ready.workspaces.create("secret")
    viewer, developer = ready.join("vera", Role.VIEWER), ready.join("dina", Role.DEVELOPER)
    stranger = ready.join("sven", Role.DEVELOPER, workspace="secret")

    with acting_as(viewer), pytest.raises(Denied):
        ready.models.evaluate("churn@2", on="holdout")
    with acting_as(stranger), pytest.raises(NotFound):
        ready.models.evaluate("default/churn@2", on="default/holdout")
    with acting_as(developer):
        assert ready.models.evaluate("churn@2", on="holdout").state is WorkflowState.WAITING


def test_a_model_that_takes_the_target_or_runs_code_is_refused(ready: OwnPlatform) -> None:
    code = b"def load(files):\n    pass\n\n\ndef predict(inputs):\n    return inputs\n"
    file = ready.blobs.upload(iter([code]))
    ready.models.register("code", files=(file.id,), paths=("model.py",), inputs=SIGNATURE, outputs=SIGNATURE)

    with pytest.raises(InvalidInput, match="could read the column that it is to predict"):
        ready.models.evaluate("code@1", on="holdout", target="churned")
    with pytest.raises(InvalidInput, match="calls, which churn@2 takes as an input"):
        ready.models.evaluate("churn@2", on="holdout", target="calls")
    with pytest.raises(InvalidInput, match="a column of holdout"):
        ready.models.evaluate("churn@2", on="holdout", target="Churned")


# --------------------------------------------------------------------------------------------- the metrics


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_a_model_that_leaves_rows_out_is_refused(tmp_path: Path) -> None:
    predictions = write(tmp_path / "p", y=[0, 1, 1, None], **{"predicted.p": [0.1, float("nan"), 0.9, 0.5]})

    with pytest.raises(InvalidInput, match="no finite number for 1 of 3 rows"):
        evaluate(predictions, target="y", prefix="predicted.")


def test_the_first_output_with_fractions_is_scored(tmp_path: Path) -> None:
    shares = [[0.8, 0.2], [0.3, 0.7], [0.6, 0.4], [0.1, 0.9]]
    predictions = write(
        tmp_path / "p", y=[0, 1, 1, 1], **{"predicted.label": [1, 0, 0, 0], "predicted.shares": shares}
    )

    found = evaluate(predictions, target="y", prefix="predicted.")

    assert (found.output, found.metrics["accuracy"], found.metrics["auc"]) == ("shares", 0.75, 1.0)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"y": ["a", "b"], "predicted.p": [0.1, 0.2]}, "numbers or booleans"),
        ({"y": pa.array([None, None], pa.int64()), "predicted.p": [0.1, 0.2]}, "a number in some rows"),
        ({"y": [0, 1], "predicted.p": ["a", "b"]}, "an output with numbers"),
        ({"y": [0, 7], "predicted.p": [[0.5, 0.5], [0.1, 0.9]]}, "the class as 0 to 1"),
    ],
    ids=["text", "no labels", "no numbers", "unknown class"],
)
def test_what_cannot_be_scored_is_refused(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        evaluate(write(tmp_path / "p", **columns), target="y", prefix="predicted.")
