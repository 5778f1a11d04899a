"""Composing ensembles: what is pinned and signed, and every fault with the step that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ensembles import add_models, add_view, ensemble, register
from falaj.errors import InvalidInput, NotFound, ResidencyDenied, TooLarge
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.registry import FileFormat, TensorSpec
from falaj.records.serving.ensembles import Ensemble
from falaj.registry.ensembles import composition
from framework_models import xgboost_booster, xgboost_bytes
from model_servers import mlp, tabular
from platforms import TWO_ZONES, OwnPlatform, make_platform


@pytest.fixture
def models(light_platform: OwnPlatform, tmp_path: Path) -> OwnPlatform:
    add_view(light_platform)
    add_models(light_platform, tmp_path)
    return light_platform


def steps(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of the ensemble, with fields of the named ones replaced."""
    found = ensemble().model_dump(exclude_defaults=True)["steps"]
    return [step | changes.get(step["name"], {}) for step in found]


def faults(platform: OwnPlatform, **changes: Any) -> list[tuple[str, str | None, str | None]]:
    with pytest.raises(InvalidInput) as refused:
        platform.models.compose("risk", ensemble=ensemble(**changes))
    return [(fault.where, fault.given, fault.allowed) for fault in refused.value.faults]


def test_a_composed_version_is_signed_typed_and_has_its_steps_as_sources(
    platform: OwnPlatform, tmp_path: Path
) -> None:
    add_view(platform)
    add_models(platform, tmp_path)

    made = platform.models.compose("risk", ensemble=ensemble(), metrics={"auc": 0.9}, card="A card.")

    assert made.format is FileFormat.ENSEMBLE
    assert [(each.name, each.dtype, each.shape) for each in made.inputs] == [
        ("amount", "float32", (-1,)),
        ("customer", "string", (-1,)),
    ]
    assert [(each.name, each.dtype, each.shape) for each in made.outputs] == [
        ("risk", "float32", (-1, 1)),
        ("scaled", "float32", (-1, 2)),
    ]
    parts = {platform.models.version(name).id for name in ("clean@1", "churn@1")}
    assert parts < set(made.sources)
    assert len(made.sources) == 3
    above = {node.id for node in platform.lineage.graph(made.id) if node.depth < 0}
    assert set(made.sources) <= above
    assert [check.ok for check in platform.models.verify("risk@1") if check.finished] == [True]
    document = json.loads(b"".join(platform.models.read("risk@1", "ensemble.json")))
    assert [step.get("version") for step in document["steps"]] == [
        platform.models.version("clean@1").id,
        None,
        platform.models.version("churn@1").id,
    ]


def test_an_alias_is_pinned_to_the_version_that_it_points_at(models: OwnPlatform, tmp_path: Path) -> None:
    models.models.promote("churn@1", to="champion")
    made = models.models.compose("risk", ensemble=ensemble(steps=steps(score={"model": "churn@champion"})))
    register(models, "churn", {"model.onnx": mlp(tmp_path / "2.onnx", widths=(4, 2, 1)).read_bytes()})

    models.models.promote("churn@2", to="champion")

    document = json.loads(b"".join(models.models.read(made.id, "ensemble.json")))
    assert document["steps"][2]["model"] == "churn@1"
    assert document["steps"][2]["version"] == models.models.version("churn@1").id


def test_a_cycle_is_shown(models: OwnPlatform) -> None:
    found = faults(
        models,
        steps=[
            {"name": "a", "model": "churn@1", "inputs": {"x": "b.y"}},
            {"name": "b", "model": "churn@1", "inputs": {"x": "c.y"}},
            {"name": "c", "model": "churn@1", "inputs": {"x": "a.y"}},
        ],
        outputs={"y": "c.y"},
    )

    assert found == [("step a", "a cycle: a needs b needs c needs a", "steps that need earlier steps only")]


def test_unknown_and_unused_steps_and_inputs_are_named(models: OwnPlatform) -> None:
    extra = {"name": "extra", "model": "churn@1", "inputs": {"x": "request.more"}}
    spare = TensorSpec(name="spare", dtype="float32", shape=(-1,))

    unknown = faults(models, steps=steps(clean={"inputs": {"amount": "claen.amount"}}), inputs=[spare])
    unused = faults(models, steps=[*steps(), extra])
    twice = faults(models, steps=[*steps(), extra | {"name": "clean"}])

    assert unknown == [
        (
            "step clean",
            "claen.amount, of an unknown step",
            "request, or one of the steps clean, customer, score",
        ),
        ("input spare", "no use", "an input that a step takes, as request.spare"),
    ]
    assert [each[0] for each in unused] == ["step extra"]
    assert twice[0][:2] == ("step clean", "a name that is there twice")


def test_every_connection_is_checked_by_name_type_and_shape(models: OwnPlatform, tmp_path: Path) -> None:
    register(models, "table", {"model.onnx": tabular(tmp_path / "t.onnx").read_bytes()})
    score = "step score (churn@1): input x"

    assert faults(models, steps=steps(score={"inputs": {"x": "clean.scaled"}})[::2]) == [
        (score, "clean.scaled: float32 [-1, 2]", "float32 [-1, 4]")
    ]
    assert faults(models, steps=steps(score={"inputs": {"x": ["clean.scaled", "customer.fetures"]}})) == [
        (score, "customer.fetures", "outputs of customer: features")
    ]
    assert faults(models, steps=steps(customer={"dtype": "float64"})) == [
        (
            score,
            "columns of clean.scaled float32 [-1, 2], customer.features float64 [-1, 2]",
            "tensors of one type, each with one or two dimensions",
        )
    ]
    assert faults(models, steps=steps(score={"inputs": {"X": "clean.scaled"}})[::2]) == [
        ("step score (churn@1): input X", "an unknown name", "the inputs x"),
        (score, "nothing", "float32 [-1, 4]"),
    ]
    assert faults(models, steps=steps(customer={"inputs": {}}))[0] == (
        *("step customer: input customer", "nothing"),
        "string or int64 or int32 or int16 or int8 or uint64 or uint32 or uint16 or uint8 [-1] or [-1, 1]",
    )
    assert faults(models, outputs={"risk": "score.z"}, steps=steps())[0][:2] == ("output risk", "score.z")
    mixed = [
        {"name": "one", "model": "table@1", "inputs": {"amount": "request.a", "category": "request.a"}},
    ]
    assert faults(models, steps=mixed, outputs={"score": "one.score"}) == [
        ("step one (table@1): input category", "request.a: float64 [-1]", "int64 [-1]")
    ]


def test_columns_of_the_request_are_to_be_declared(models: OwnPlatform) -> None:
    joined = [{"name": "score", "model": "churn@1", "inputs": {"x": ["request.a", "request.rest"]}}]
    declared = [
        {"name": "a", "dtype": "float32", "shape": [-1]},
        {"name": "rest", "dtype": "float32", "shape": [-1, 3]},
    ]

    found = faults(models, steps=joined, outputs={"y": "score.y"})
    made = models.models.compose(
        "risk", ensemble=ensemble(steps=joined, outputs={"y": "score.y"}, inputs=declared)
    )

    assert [each[:2] for each in found] == [
        ("input a", "no type: no step takes it as it is"),
        ("input rest", "no type: no step takes it as it is"),
    ]
    assert [each.shape for each in made.inputs] == [(-1,), (-1, 3)]


def test_a_step_with_a_fixed_number_of_rows_is_refused(models: OwnPlatform, tmp_path: Path) -> None:
    fixed = mlp(tmp_path / "fixed.onnx", widths=(4, 1), rows=8)
    register(models, "fixed", {"model.onnx": fixed.read_bytes()})
    only = [{"name": "only", "model": "fixed@1", "inputs": {"x": "request.x"}}]

    found = faults(models, steps=only, outputs={"y": "only.y"})

    assert found[0][:2] == ("step only (fixed@1): input x", "the shape [8, 4]")


def test_trees_have_their_tensors_without_a_signature(models: OwnPlatform) -> None:
    register(models, "trees", {"model.ubj": xgboost_bytes(xgboost_booster())})
    only = [{"name": "only", "model": "trees@1", "inputs": {"features": "request.x"}}]

    made = models.models.compose("risk", ensemble=ensemble(steps=only, outputs={"p": "only.probability"}))

    assert made.inputs[0].shape == (-1, 4)


def test_an_ensemble_is_not_a_step_of_another(models: OwnPlatform) -> None:
    models.models.compose("risk", ensemble=ensemble())
    only = [{"name": "only", "model": "risk@1", "inputs": {"amount": "request.amount"}}]

    with pytest.raises(InvalidInput, match="step only") as refused:
        models.models.compose("outer", ensemble=ensemble(steps=only, outputs={"y": "only.risk"}))

    assert refused.value.faults[0].allowed == "a model: ensembles are not nested"


def test_a_step_that_does_not_exist_or_is_hidden_looks_the_same(models: OwnPlatform) -> None:
    models.workspaces.create("risks")
    omar = models.join("omar", Role.DEVELOPER, workspace="risks")
    secret = [{"name": "only", "model": "default/churn@1", "inputs": {"x": "request.x"}}]
    nothing = [{"name": "only", "model": "default/nothing@1", "inputs": {"x": "request.x"}}]

    with acting_as(omar):
        with pytest.raises(NotFound) as hidden:
            models.models.compose(
                "risk", ensemble=ensemble(steps=secret, outputs={"y": "only.y"}), workspace="risks"
            )
        with pytest.raises(NotFound) as missing:
            models.models.compose(
                "risk", ensemble=ensemble(steps=nothing, outputs={"y": "only.y"}), workspace="risks"
            )

    words = "step only: there is no model_version 'default/{}@1', or you may not see it"
    assert hidden.value.message == words.format("churn")
    assert missing.value.message == words.format("nothing")
    assert [model.name for model in models.models.list(workspace="risks").items] == []


def test_a_step_of_another_workspace_needs_the_right_to_read_it(models: OwnPlatform) -> None:
    models.workspaces.create("risks")
    omar = models.join("omar", Role.DEVELOPER, workspace="risks")
    models.workspaces.grant("default", "omar", role=Role.VIEWER)
    only = [{"name": "only", "model": "default/churn@1", "inputs": {"x": "request.x"}}]

    with acting_as(omar):
        made = models.models.compose(
            "risk", ensemble=ensemble(steps=only, outputs={"y": "only.y"}), workspace="risks"
        )
    models.workspaces.revoke("default", "omar", role=Role.VIEWER)

    assert made.workspace != models.models.version("churn@1").workspace
    with acting_as(omar), pytest.raises(NotFound, match=r"churn@1"):
        models.endpoints.deploy("risk", model="risks/risk@1", workspace="risks")


def test_restrictions_of_steps_and_views_flow_into_the_ensemble(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=TWO_ZONES) as platform:
        add_view(platform, only=("AE",))
        add_models(platform, tmp_path)

        with pytest.raises(ResidencyDenied):
            platform.models.compose("risk", ensemble=ensemble(), zone="frankfurt")
        made = platform.models.compose("risk", ensemble=ensemble())

        assert made.label.only == frozenset({"AE"})
        with pytest.raises(ResidencyDenied):
            platform.endpoints.deploy("risk", model="risk@1", zone="frankfurt")


def test_a_json_file_cannot_pass_for_an_ensemble(models: OwnPlatform) -> None:
    made = models.models.compose("risk", ensemble=ensemble())
    document = b"".join(models.models.read(made.id, "ensemble.json"))

    with pytest.raises(InvalidInput, match="files"):
        register(models, "forged", {"ensemble.json": document})


def test_a_description_that_is_too_large_is_refused(
    models: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "DOCUMENT_BYTES", 1000)

    with pytest.raises(TooLarge):
        models.models.compose("risk", ensemble=ensemble())


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"name": "a"}, "either a model or a lookup"),
        ({"name": "request", "model": "churn@1"}, "no step may be called request"),
        ({"name": "Clean", "model": "churn@1"}, "the name of a step is"),
        ({"name": "a", "model": "churn@1", "dtype": "float64"}, "dtype is of lookups"),
        ({"name": "a", "model": "churn@1", "inputs": {"x": "clean"}}, "a source is"),
        ({"name": "a", "model": "churn@1", "inputs": {"x": []}}, "at least 1"),
    ],
)
def test_a_step_that_is_none_is_refused_by_the_record(step: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ensemble.model_validate({"steps": [step], "outputs": {"y": "a.y"}})


def test_an_ensemble_has_at_most_32_steps() -> None:
    many = [{"name": f"s{number}", "model": "churn@1"} for number in range(33)]

    with pytest.raises(ValueError, match="at most 32"):
        Ensemble.model_validate({"steps": many, "outputs": {"y": "s1.y"}})
