"""Policies mark endpoints and aliases as production: a version without approval does not come into use there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.errors import Denied
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.governance.identity import Role
from falaj.records.serving.endpoints import Route
from model_servers import constant
from platforms import OwnPlatform

BY_NAME = """
@id("production")
forbid (principal, action == Action::"endpoints.serve", resource)
when { resource.name like "prod-*" }
unless { context.approved };
"""
RULE = "policy:production@1#production"


@pytest.fixture
def dana(light_platform: OwnPlatform) -> Caller:
    return light_platform.join("dana", Role.DEVELOPER)


@pytest.fixture
def noor(light_platform: OwnPlatform) -> Caller:
    return light_platform.join("noor", Role.APPROVER)


@pytest.fixture
def platform(light_platform: OwnPlatform, tmp_path: Path, dana: Caller, noor: Caller) -> OwnPlatform:
    """Versions m@1 to m@3 by dana; m@1 is approved for champion, which is not protected."""
    with acting_as(dana):
        for number in (1, 2, 3):
            data = constant(tmp_path / f"{number}.onnx", float(number)).read_bytes()
            blob = light_platform.put(f"m-{number}", data)
            light_platform.models.register("m", files=(blob.id,), paths=("model.onnx",))
    with acting_as(noor):
        light_platform.models.approve("m@1", alias="champion")
    return light_platform


def refusal(act: Callable[[], object]) -> Denied:
    with pytest.raises(Denied) as denied:
        act()
    return denied.value


@pytest.mark.slow
def test_a_policy_marks_endpoints_as_production_by_name(
    platform: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    platform.policies.publish("production", text=BY_NAME)
    with acting_as(dana):
        platform.endpoints.deploy("trial", model="m@2")
        platform.endpoints.deploy("prod-churn", model="m@1")

        refused = refusal(lambda: platform.endpoints.deploy("prod-new", model="m@2"))
        splits = (Route(version="1", weight=99), Route(version="2", weight=1))
        split = refusal(lambda: platform.endpoints.route("prod-churn", routes=splits))
        unseen = (Route(version="1", weight=100), Route(version="2", weight=0))
        refusal(lambda: platform.endpoints.route("prod-churn", routes=unseen))

    assert RULE in refused.message
    assert (refused.details["rule"], split.details["rule"]) == (RULE, RULE)
    assert refused.faults[0].fix == "falaj models approve m@2 --alias champion"
    assert "noor" in str(refused.faults[0].allowed)
    assert [each.name for each in platform.endpoints.list().items] == ["trial", "prod-churn"]
    with acting_as(noor):
        platform.models.approve("m@2", alias="champion")
    with acting_as(dana):
        platform.endpoints.deploy("prod-new", model="m@2")


@pytest.mark.slow
def test_the_refusal_names_the_approval_that_the_policy_asks_for(
    platform: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    text = BY_NAME.replace("context.approved", 'context.independent.contains("shadow")')
    with acting_as(dana):
        platform.models.promote("m@2", to="shadow")
    platform.policies.publish("production", text=text)

    with acting_as(dana):
        refused = refusal(lambda: platform.endpoints.deploy("prod-churn", model="m@1"))

    assert refused.faults[0].fix == "falaj models approve m@1 --alias shadow"
    assert "did not appoint" in str(refused.faults[0].allowed)
    with acting_as(noor):
        platform.models.approve("m@1", alias="shadow")
    with acting_as(dana):
        platform.endpoints.deploy("prod-churn", model="m@1")


@pytest.mark.slow
def test_a_policy_that_no_approval_satisfies_suggests_none(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("production", text=BY_NAME.replace("context.approved", "false"))

    with acting_as(dana):
        refused = refusal(lambda: platform.endpoints.deploy("prod-churn", model="m@1"))

    assert RULE in refused.message
    assert refused.faults == ()


@pytest.mark.slow
def test_a_policy_marks_a_workspace_or_a_label(platform: OwnPlatform, dana: Caller) -> None:
    text = BY_NAME.replace('resource.name like "prod-*"', 'resource.classes.contains("personal")')
    platform.policies.publish("production", text=text, workspace="default")
    with acting_as(dana):
        platform.endpoints.deploy("trial", model="m@2")
        platform.endpoints.deploy("trial", model="m@3")
    platform.objects.label("model_version:m@2", classes=("personal",))

    with acting_as(dana):
        refusal(lambda: platform.endpoints.deploy("trial", model="m@2"))  # it would become personal with it

    assert platform.endpoints.show("trial").routes[0].version == "3"


def test_a_token_of_limited_scope_deploys_as_before(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("production", text=BY_NAME)

    with acting_as(replace(dana, actions=("endpoints.deploy", "models.read"))):
        platform.endpoints.deploy("prod-churn", model="m@1")
        refused = refusal(lambda: platform.endpoints.deploy("prod-churn", model="m@2"))

    assert refused.details["rule"] == RULE


def test_what_serves_already_may_stay_and_a_way_back_does_not_wait(
    platform: OwnPlatform, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana):
        platform.endpoints.deploy("prod-churn", model="m@3")
    platform.policies.publish("production", text=BY_NAME)
    with acting_as(dana):
        both = (Route(version="3", weight=50), Route(version="1", weight=50))
        platform.endpoints.route("prod-churn", routes=both)

        platform.endpoints.route("prod-churn", routes=(Route(version="3", weight=100),))

        platform.endpoints.deploy("prod-churn", model="m@1")
        refusal(lambda: platform.endpoints.deploy("prod-churn", model="m@3"))


@pytest.mark.parametrize("by_policy", [True, False])
def test_a_version_whose_approval_was_withdrawn_gets_no_larger_share(
    platform: OwnPlatform, dana: Caller, noor: Caller, by_policy: bool
) -> None:
    with acting_as(noor):
        platform.models.approve("m@2", alias="champion")
    if by_policy:
        platform.policies.publish("production", text=BY_NAME)
    else:
        platform.models.protect("m", alias="champion")
    both = (Route(version="1", weight=50), Route(version="2", weight=50))
    with acting_as(dana):
        platform.models.promote("m@1", to="champion")
        platform.endpoints.deploy("prod-churn", model="m@1")
        platform.endpoints.route("prod-churn", routes=both)
        platform.models.promote("m@2", to="champion")
        platform.models.rollback("m", alias="champion")

        refusal(lambda: platform.endpoints.deploy("prod-churn", model="m@2"))
        more = (Route(version="1", weight=4), Route(version="2", weight=5))
        refusal(lambda: platform.endpoints.route("prod-churn", routes=more))
        less = (Route(version="1", weight=3), Route(version="2", weight=1))
        platform.endpoints.route("prod-churn", routes=less)
        platform.endpoints.deploy("prod-churn", model="m@1")


def test_an_endpoint_that_a_policy_marks_says_for_which_alias(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("production", text=BY_NAME)
    with acting_as(dana):
        platform.endpoints.deploy("trial", model="m@1")
        platform.endpoints.deploy("prod-churn", model="m@1")

        assert platform.endpoints.show("trial").protected is None
        assert platform.endpoints.show("prod-churn").protected == "champion"


@pytest.mark.slow
def test_a_policy_demands_approval_for_an_alias(platform: OwnPlatform, dana: Caller, noor: Caller) -> None:
    text = """
    @id("production")
    forbid (principal, action == Action::"models.assign", resource)
    when { context.alias == "live" && context.move == "promote" }
    unless { context.approved };
    """
    platform.policies.publish("production", text=text)
    with acting_as(dana):
        platform.models.promote("m@2", to="trial")

        refused = refusal(lambda: platform.models.promote("m@1", to="live"))  # approved for another alias

    assert refused.faults[0].fix == "falaj models approve m@1 --alias live"
    with acting_as(noor):
        for version in ("m@1", "m@2"):
            platform.models.approve(version, alias="live")
    with acting_as(dana):
        platform.models.promote("m@1", to="live")
        platform.models.promote("m@2", to="live")
        platform.models.rollback("m", alias="live")
        refusal(lambda: platform.models.promote("m@2", to="live"))


@pytest.mark.slow
def test_a_developer_does_not_remove_a_protected_endpoint(platform: OwnPlatform, dana: Caller) -> None:
    admin = platform.join("adam", Role.ADMIN)
    platform.policies.publish("production", text=BY_NAME)
    with acting_as(dana):
        for name in ("trial", "shop", "prod-churn"):
            platform.endpoints.deploy(name, model="m@1")
    platform.endpoints.protect("shop")

    with acting_as(dana):
        platform.endpoints.remove("trial")
        refused = refusal(lambda: platform.endpoints.remove("shop"))
        refusal(lambda: platform.endpoints.remove("prod-churn"))

    assert "administrator" in refused.message
    with acting_as(admin):
        platform.endpoints.remove("shop")
        platform.endpoints.remove("prod-churn")
    with acting_as(dana):
        refusal(lambda: platform.endpoints.deploy("shop", model="m@2"))  # the protection is of the name


@pytest.mark.slow
def test_a_label_that_flows_into_an_object_ends_earlier_decisions(
    platform: OwnPlatform, dana: Caller
) -> None:
    """Decisions are cached; one that rests on the label of before must not outlive it."""
    text = """forbid (principal, action == Action::"endpoints.show", resource)
    when { resource.classes.contains("personal") };"""
    platform.policies.publish("private", text=text)
    platform.objects.label("model_version:m@2", classes=("personal",))
    with acting_as(dana):
        platform.endpoints.deploy("trial", model="m@1")
        platform.endpoints.show("trial")

        platform.endpoints.deploy("trial", model="m@2")

        refusal(lambda: platform.endpoints.show("trial"))
