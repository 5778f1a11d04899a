"""The operations of optimization: inputs, permissions and stored results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import model_files
from falaj.errors import Denied, InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId, new_id
from falaj.records.optimization import (
    AcceptanceBudget,
    Interval,
    Measurement,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)
from platforms import InternalAsController

if TYPE_CHECKING:
    from conftest import OptimizationEnv  # type: ignore[attr-defined]

MEASURED = Measurement(
    latency_p50_us=10,
    latency_p99_us=20,
    rows_per_s_32=1e5,
    rows_per_s_256=2e5,
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


def job_object(env: OptimizationEnv) -> ObjectId:
    """The object of a job."""
    home = env.platform.workspaces.show("default")
    owner = env.version.author
    ident = new_id("job")
    new = StoredObject(
        id=ident, workspace=home.id, kind="job", name=ident, owner=owner, created_at=env.platform.clock.now
    )
    with env.platform.database.write() as tx:
        objects.create(tx, new)
    return ident


def record(env: OptimizationEnv, **changed: Any):
    given = {**env.start, "job": job_object(env), "budget": AcceptanceBudget(), "report": REPORT, **changed}
    optimization = InternalAsController(env.platform.optimization, env.platform)
    return optimization.record(given.pop("model"), **given)


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
        "target": "late",
        "features": [*start["features"]],
        "recipes": ["onnx", "int8"],
        "budget": {"speedup": 1.1, "worse": 0.02},
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
        record(light_env, job=job_object(light_env))


@pytest.mark.slow
def test_features_are_those_of_the_signature_unless_given(light_env: OptimizationEnv) -> None:
    light_env.platform.optimization.start("late@1", data=light_env.data, target="late")

    (given,) = [row["input"] for row in light_env.platform.rows(_work())]
    assert tuple(given["features"]) == light_env.start["features"]


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
    ],
    ids=["target", "feature", "twice", "target among them", "no recipe", "unknown recipe", "budget"],
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
