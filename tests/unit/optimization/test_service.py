"""The operations of optimization: inputs, permissions and stored results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import model_files
from falaj.errors import Denied, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.records.optimization import (
    AcceptanceBudget,
    Interval,
    Measurement,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)

if TYPE_CHECKING:
    from conftest import OptimizationEnv  # type: ignore[attr-defined]

MEASURED = Measurement(
    latency_p50_us=10,
    latency_p99_us=20,
    rows_per_s_32=1e5,
    rows_per_s=2e5,
    best_batch=256,
    cpu_us_per_row=5,
    size_bytes=1000,
    loss=0.4,
    auc=0.8,
)
REPORT = OptimizationReport(
    metric="log_loss",
    rows=1500,
    host="a processor",
    original=MEASURED,
    variants=(
        Variant(
            recipe="onnx",
            verdict=OptimizationVerdict.ACCEPTED,
            reason="faster",
            measured=MEASURED,
            speedup={"a single row": Interval(low=1.9, middle=2, high=2.1)},
            worse=Interval(low=0, middle=0, high=0),
            file="variants/onnx/model.onnx",
            version="late@2",
        ),
        Variant(recipe="int8", verdict=OptimizationVerdict.REFUSED, reason="trees only compare and add"),
    ),
)


def record(env: OptimizationEnv, **changed: Any):
    return env.record(REPORT, **changed)


@pytest.mark.slow
def test_a_start_is_recorded_for_the_controller(env: OptimizationEnv) -> None:
    start = env.start
    work = env.platform.optimization.start(start.pop("model"), **start, budget=AcceptanceBudget(worse=0.02))

    assert (work.workflow, work.state) == ("optimization.start", "waiting")
    (given,) = [row["input"] for row in env.platform.rows(_work())]
    assert given == {
        "model": env.version.id,
        "workspace": env.version.workspace,
        "data": env.data,
        "held_out": None,
        "target": "late",
        "features": [*start["features"]],
        "recipes": ["onnx", "int8", "int8-static", "fp16", "bf16"],
        "budget": {"speedup": 1.1, "worse": 0.02, "metric": None, "relative": True},
        "gpus": 0,
        "queue": "default",
        "environment": None,
    }


@pytest.mark.slow
def test_the_report_is_kept(env: OptimizationEnv) -> None:
    made = record(env)

    assert (made.model, made.data, made.report) == ("late@1", "june", REPORT)
    assert env.platform.optimization.show(made.id) == made
    assert env.platform.optimization.list().items == (made,)
    above = [node.id for node in env.platform.lineage.graph(made.id, direction=Direction.UP)]
    assert {env.version.id, env.data, made.job} <= set(above)


@pytest.mark.slow
def test_a_developer_cannot_record_a_report(light_env: OptimizationEnv) -> None:
    developer = light_env.platform.join("dana", Role.DEVELOPER)

    with acting_as(developer), pytest.raises(Denied):
        record(light_env, job=light_env.job_object())


@pytest.mark.slow
def test_features_are_those_of_the_signature_unless_given(light_env: OptimizationEnv) -> None:
    light_env.platform.optimization.start("late@1", data=light_env.data, target="late")

    (given,) = [row["input"] for row in light_env.platform.rows(_work())]
    assert tuple(given["features"]) == light_env.start["features"]


def test_the_data_are_by_default_the_training_set_of_the_version(light_env: OptimizationEnv) -> None:
    light_env.platform.optimization.start("late@1", target="late", gpus=1)

    (given,) = [row["input"] for row in light_env.platform.rows(_work())]
    assert (given["data"], given["held_out"], given["gpus"]) == (light_env.data, None, 1)


def test_a_held_out_set_is_another_than_the_data(light_env: OptimizationEnv) -> None:
    other = light_env.platform.features.training_set("july", spine="blob:spine", views=("origins",)).id
    start = light_env.platform.optimization.start

    with pytest.raises(InvalidInput, match="june, which is the data"):
        start("late@1", target="late", held_out=light_env.data)
    start("late@1", target="late", held_out=other)

    (given,) = [row["input"] for row in light_env.platform.rows(_work())]
    assert (given["data"], given["held_out"]) == (light_env.data, other)
    made = record(light_env, held_out=other)
    assert (made.data, made.held_out) == ("june", "july")
    above = [node.id for node in light_env.platform.lineage.graph(made.id, direction=Direction.UP)]
    assert {light_env.data, other} <= set(above)


def test_a_target_that_is_not_clear_is_asked_for(light_env: OptimizationEnv) -> None:
    with pytest.raises(InvalidInput, match="late, carrier") as caught:
        light_env.platform.optimization.start("late@1")

    assert "origin" not in str(caught.value)  # a key
    assert "event_time" not in str(caught.value)


def test_a_version_without_a_training_set_needs_data(light_env: OptimizationEnv) -> None:
    blob = light_env.version.files[0].blob
    light_env.platform.models.register("bare", files=(blob,), paths=("model.json",))

    with pytest.raises(InvalidInput, match="bare@1 names no training set"):
        light_env.platform.optimization.start("bare@1", target="late", features=("f0",))


def test_the_stored_report_has_the_table_and_what_to_serve(light_env: OptimizationEnv) -> None:
    made = record(light_env)

    assert [(row.name, row.version) for row in made.table] == [("original", "late@1"), ("onnx", "late@2")]
    assert made.recommendation is not None
    assert "no GPU was measured" in made.recommendation.words
    assert made.currency is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": "delay"}, "target\n  given    delay"),
        ({"features": ("f0", "speed")}, "features\n  given    speed"),
        ({"features": ("f0", "f0")}, "each column once"),
        ({"features": ("f0", "late")}, "not one of the features"),
        ({"recipes": ()}, "recipes"),
        ({"recipes": ("int4",)}, "recipes"),
        ({"budget": {"worse": -1}}, "budget.worse"),
        ({"gpus": 2}, "gpus"),
    ],
    ids=["target", "feature", "twice", "target among them", "no recipe", "unknown recipe", "budget", "gpus"],
)
def test_an_invalid_start_is_refused(changed: dict[str, Any], words: str, light_env: OptimizationEnv) -> None:
    start = {**light_env.start, **changed}

    with pytest.raises(InvalidInput) as caught:
        light_env.platform.optimization.start(start.pop("model"), **start)

    assert words in str(caught.value)
    assert light_env.platform.count(_work()) == 0


def test_a_format_that_cannot_be_measured_is_refused(light_env: OptimizationEnv) -> None:
    platform = light_env.platform
    blob = platform.blobs.upload(iter([model_files.safetensors()]))
    platform.models.register("weights", files=(blob.id,), paths=("w.safetensors",))

    with pytest.raises(InvalidInput, match="weights@1, which is safetensors"):
        platform.optimization.start("weights@1", data=light_env.data, target="late", features=("f0",))


@pytest.mark.slow
def test_unknown_models_and_data_are_not_found(light_env: OptimizationEnv) -> None:
    start = light_env.platform.optimization.start

    with pytest.raises(NotFound):
        start("late@7", data=light_env.data, target="late")
    with pytest.raises(NotFound):
        start("late@1", data="july", target="late")


@pytest.mark.slow
def test_a_viewer_may_read_but_not_start(light_env: OptimizationEnv) -> None:
    made = record(light_env)
    viewer = light_env.platform.join("vera", Role.VIEWER)
    start = light_env.start

    with acting_as(viewer):
        assert light_env.platform.optimization.show(made.id) == made
        with pytest.raises(Denied):
            light_env.platform.optimization.start(start.pop("model"), **start)


def test_labels_flow_into_the_kept_report(light_env: OptimizationEnv) -> None:
    light_env.platform.objects.label(light_env.data, only=("AE",))

    made = record(light_env)

    assert light_env.platform.objects.show(made.id).label.only == frozenset({"AE"})


def _work():
    from falaj.control.tables import work

    return work
