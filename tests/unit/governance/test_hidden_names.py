"""What a caller may not see is not named, described or changed by operations that find objects by themselves."""

from __future__ import annotations

from datetime import timedelta

import pytest

from falaj.errors import NotFound, ResidencyDenied
from falaj.governance.lineage.service import HIDDEN
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.control.pipelines import Pipeline
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.records.training.jobs import JobSpec
from model_files import onnx
from platforms import OwnPlatform

HIDING = """
@id("closed") forbid (principal, action == Action::"objects.show", resource)
when { principal.name == "dana" && resource.name like "closed*" };
"""


def view(name: str, *columns: str) -> FeatureView:
    features = tuple(Feature(name=column, type=ColumnType.FLOAT) for column in columns or ("value",))
    return FeatureView(name=name, entities=("customer",), columns=features)


def pipeline(name: str, *, spine: str = "facts", endpoint: str = "churn") -> Pipeline:
    return Pipeline(
        name=name,
        endpoint=endpoint,
        model="churn",
        spine=spine,
        views=("facts",),
        window=timedelta(days=30),
        job=JobSpec(name="train", script="train.py"),
        on_drift=False,
    )


@pytest.fixture
def dana(light_platform: OwnPlatform) -> Caller:
    """A developer to whom a policy hides what is called closed-…; another workspace has a view of salaries."""
    platform = light_platform
    customer = Entity(name="customer", key="customer")
    platform.workspaces.create("secret")
    platform.features.apply(entities=(customer,), views=(view("salaries"),), workspace="secret")
    platform.features.apply(
        entities=(customer,), views=(view("facts"), view("closed-view", "first", "second"))
    )
    for name in ("churn", "closed-model"):
        blob = platform.blobs.upload(iter([onnx()]))
        platform.models.register(name, files=(blob.id,), paths=("model.onnx",))
    platform.endpoints.deploy("churn", model="churn@1")
    platform.endpoints.deploy("closed-endpoint", model="churn@1")
    platform.pipelines.apply(pipeline("closed-pipeline"))
    platform.policies.publish("closed", text=HIDING)
    return platform.join("dana", Role.DEVELOPER)


@pytest.mark.slow
def test_a_lookup_does_not_tell_the_name_of_a_hidden_view(light_platform: OwnPlatform, dana: Caller) -> None:
    ident = light_platform.features.show("secret/salaries").id
    given = {ident: "view_" + "0" * 26, "secret/salaries": "secret/nothing"}

    with acting_as(dana):
        for hidden, unknown in given.items():
            errors = []
            for each in (hidden, unknown):
                with pytest.raises(NotFound) as refused:
                    light_platform.endpoints.deploy(
                        "churn", model="churn@1", lookup=Lookup(views=(ViewLookup(view=each),))
                    )
                errors.append(refused.value.message.replace(each, "…"))

            assert errors[0] == errors[1]


@pytest.mark.slow
def test_a_lookup_that_may_not_lie_there_does_not_tell_where_its_rows_came_from(
    light_platform: OwnPlatform, dana: Caller
) -> None:
    rows = b"customer,event_time,value\n1,2026-01-01T00:00:00Z,1\n"
    source = light_platform.put("wages", rows, workspace="secret")
    copy = light_platform.blobs.upload(iter([rows]), sources=(source.id,))
    light_platform.features.ingest("facts", data=copy.id)
    light_platform.objects.label(source.id, only=("DE",))

    with acting_as(dana), pytest.raises(ResidencyDenied) as refused:
        light_platform.endpoints.deploy(
            "churn", model="churn@1", lookup=Lookup(views=(ViewLookup(view="facts"),))
        )

    assert "wages" not in str(refused.value.faults) + refused.value.message
    assert HIDDEN in str(refused.value.faults)


def test_what_is_hidden_is_not_replaced_by_its_name(light_platform: OwnPlatform, dana: Caller) -> None:
    platform = light_platform
    blob = platform.blobs.upload(iter([onnx()]))
    before = platform.features.show("closed-view"), platform.endpoints.show("closed-endpoint")

    with acting_as(dana):
        for attempt in (
            lambda: platform.features.plan(views=(view("closed-view", "other"),)),
            lambda: platform.features.apply(views=(view("closed-view", "other"),)),
            lambda: platform.endpoints.deploy("closed-endpoint", model="churn@1"),
            lambda: platform.models.register("closed-model", files=(blob.id,), paths=("model.onnx",)),
            lambda: platform.pipelines.apply(pipeline("closed-pipeline")),
            lambda: platform.pipelines.apply(pipeline("own", spine="closed-view")),
            lambda: platform.pipelines.apply(pipeline("own", endpoint="closed-endpoint")),
        ):
            with pytest.raises(NotFound, match="closed-"):
                attempt()

    assert (platform.features.show("closed-view"), platform.endpoints.show("closed-endpoint")) == before
    assert platform.models.show("closed-model").versions == 1
