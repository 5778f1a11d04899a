"""Custom policies: expressible rules, their scope, and denial when one cannot be evaluated."""

from __future__ import annotations

import pytest

from falaj.errors import Denied, NotFound, PolicyInvalid
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.governance.identity import Role
from platforms import OwnPlatform

OVERFLOW = "9223372036854775807 + 1 == 0"


def no_reading(condition: str) -> str:
    return f'@id("why") forbid (principal, action == Action::"blobs.read", resource) when {{ {condition} }};'


@pytest.fixture
def dana(platform: OwnPlatform) -> Caller:
    return join_dana(platform)


@pytest.fixture
def light_dana(light_platform: OwnPlatform) -> Caller:
    return join_dana(light_platform)


def join_dana(platform: OwnPlatform) -> Caller:
    """Return a developer in the workspaces `default` and `other`, both of which have a blob `data`."""
    platform.workspaces.create("other")
    caller = platform.join("dana", Role.DEVELOPER)
    platform.workspaces.grant("other", "dana", role=Role.DEVELOPER)
    platform.put("data", b"bytes")
    platform.put("data", b"bytes", workspace="other")
    return caller


def may_read(platform: OwnPlatform, caller: Caller, blob: str = "data") -> bool:
    with acting_as(caller):
        try:
            return platform.get(blob) == b"bytes"
        except Denied:
            return False


# ------------------------------------------------------------------------------------------- attributes


CONDITIONS = [
    'resource has zone && resource.zone == "local"',
    'resource.classes.contains("pii")',
    'resource has jurisdictions && !resource.jurisdictions.contains("DE")',
    'resource.name like "dat*"',
    "resource.owner != principal.owner",
    'principal.name == "dana"',
    'context.origin == "test"',
    'resource in Workspace::"{workspace}"',
    'resource.workspace == Workspace::"{workspace}"',
    'principal in Group::"{group}"',
    'principal in Role::"{workspace}/developer"',
]


@pytest.mark.slow
def test_a_policy_forbids_by_attribute(platform: OwnPlatform, dana: Caller) -> None:
    platform.objects.label("blob:data", only=("AE",), classes=("pii",))
    group = platform.groups.create("analysts")
    platform.groups.add("analysts", "dana")
    workspace = platform.workspaces.show("default")

    answers = {}
    for condition in CONDITIONS:
        filled = condition.replace("{workspace}", workspace.id).replace("{group}", group.id)
        platform.policies.publish("limits", text=no_reading(f"!({filled})"))
        allowed = may_read(platform, dana)
        platform.policies.publish("limits", text=no_reading(filled))
        answers[condition] = (allowed, may_read(platform, dana))

    assert answers == dict.fromkeys(CONDITIONS, (True, False))


@pytest.mark.slow
def test_a_denial_names_the_policy_its_version_and_its_rule(
    light_platform: OwnPlatform, light_dana: Caller
) -> None:
    light_platform.policies.publish("limits", text=no_reading("true"))
    light_platform.policies.publish("limits", text=no_reading("true"))

    with acting_as(light_dana), pytest.raises(Denied) as denied:
        light_platform.get("data")

    assert denied.value.details["rule"] == "policy:limits@2#why"
    assert light_platform.entries()[-1]["rule"] == "policy:limits@2#why"


@pytest.mark.slow
def test_a_policy_on_a_workspaces_name_means_its_name(
    light_platform: OwnPlatform, light_dana: Caller
) -> None:
    text = no_reading('resource.workspace.name == "other"')

    light_platform.policies.publish("limits", text=text, workspace="platform")

    assert may_read(light_platform, light_dana)
    assert not may_read(light_platform, light_dana, "other/data")


@pytest.mark.slow
def test_rules_see_a_label_that_is_added_later(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("limits", text=no_reading('resource.classes.contains("pii")'))
    before = may_read(platform, dana)

    platform.objects.label("blob:data", classes=("pii",))

    assert (before, may_read(platform, dana)) == (True, False)


@pytest.mark.slow
def test_rules_see_a_name_that_is_added_later(light_platform: OwnPlatform, light_dana: Caller) -> None:
    light_platform.policies.publish("limits", text=no_reading('resource.name like "secret-*"'))
    staged = light_platform.blobs.upload(iter([b"bytes"]))
    before = may_read(light_platform, light_dana, staged.id)

    light_platform.blobs.commit(staged.id, name="secret-plans")

    assert (before, may_read(light_platform, light_dana, staged.id)) == (True, False)


# ------------------------------------------------------------------------------------------------ scope


@pytest.mark.slow
def test_a_policy_holds_in_its_workspace_only(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("limits", text=no_reading("true"), workspace="other")

    assert may_read(platform, dana)
    assert not may_read(platform, dana, "other/data")


@pytest.mark.slow
def test_a_permit_of_a_workspace_opens_that_workspace_only(
    light_platform: OwnPlatform, light_dana: Caller
) -> None:
    guest = light_platform.join("guest")
    light_platform.policies.publish("open", text="permit (principal, action, resource);", workspace="other")

    with acting_as(guest):
        assert light_platform.get("other/data") == b"bytes"
        with pytest.raises(NotFound):
            light_platform.get("data")
        with pytest.raises(Denied):
            light_platform.workspaces.create("mine")


@pytest.mark.slow
def test_a_policy_of_the_platform_holds_everywhere(light_platform: OwnPlatform, light_dana: Caller) -> None:
    light_platform.policies.publish("limits", text=no_reading("true"), workspace="platform")

    assert not may_read(light_platform, light_dana)
    assert not may_read(light_platform, light_dana, "other/data")


@pytest.mark.slow
def test_an_evaluation_error_denies(light_platform: OwnPlatform, light_dana: Caller) -> None:
    light_platform.policies.publish("broken", text=no_reading(OVERFLOW))

    with acting_as(light_dana), pytest.raises(Denied) as denied:
        light_platform.get("data")

    assert denied.value.details["rule"] == "evaluation-error"


@pytest.mark.slow
def test_an_evaluation_error_denies_in_its_workspace_only(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("broken", text=no_reading(OVERFLOW), workspace="other")

    assert may_read(platform, dana)
    assert not may_read(platform, dana, "other/data")


@pytest.mark.slow
def test_a_withdrawn_policy_has_no_effect(platform: OwnPlatform, dana: Caller) -> None:
    platform.policies.publish("limits", text=no_reading("true"))
    forbidden = may_read(platform, dana)

    platform.policies.withdraw("limits")

    assert (forbidden, may_read(platform, dana)) == (False, True)
    assert platform.policies.list().items == ()


@pytest.mark.slow
def test_a_new_version_takes_the_place_of_the_old_one(
    light_platform: OwnPlatform, light_dana: Caller
) -> None:
    light_platform.policies.publish("limits", text=no_reading("true"))

    newer = light_platform.policies.publish("limits", text=no_reading("false"))

    assert newer.version == 2
    assert may_read(light_platform, light_dana)


@pytest.mark.slow
def test_a_change_takes_effect_in_another_process_at_once(platform: OwnPlatform, dana: Caller) -> None:
    other = platform.again()
    before = may_read(other, dana)

    platform.policies.publish("limits", text=no_reading("true"))
    published = may_read(other, dana)
    platform.policies.withdraw("limits")
    withdrawn = may_read(other, dana)
    platform.workspaces.revoke("default", "dana", role=Role.DEVELOPER)

    assert (before, published, withdrawn) == (True, False, True)
    with acting_as(dana), pytest.raises(NotFound):
        other.get("data")


@pytest.mark.slow
def test_a_stream_stops_when_its_reader_loses_the_right(
    light_platform: OwnPlatform, light_dana: Caller
) -> None:
    light_platform.parts.gate._recheck_s = 0.0
    light_platform.put("large", bytes(5 << 20))
    with acting_as(light_dana):
        stream = light_platform.blobs.read("large")
        next(stream)

    light_platform.policies.publish("limits", text=no_reading("true"))

    with pytest.raises(Denied):
        list(stream)


# ------------------------------------------------------------------------------------------- publishing


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "permit (principal, action, resource",
        "permit",
        "// nothing but a comment\npermit (principal, action, resource) when { };",
        'forbid (principal, action == Action::"blob.fly", resource);',
        'forbid (principal, action, resource) when { resource.colour == "red" };',
        'forbid (principal, action == Action::"blobs.read", resource) when { resource.zone == "local" };',
        'forbid (principal, action == Action::"blobs.read", resource) when { resource.name == 5 };',
        'forbid (principal, action == Action::"blobs.read", resource == Workspace::"w");',
        'forbid (principal == Robot::"r", action, resource);',
        "forbid (principal == ?principal, action, resource);",
        'permit (principal, action, resource); forbid (principal, action == Action::"blob.fly", resource);',
    ],
)
def test_an_invalid_policy_is_refused(light_platform: OwnPlatform, text: str) -> None:
    for attempt in (light_platform.policies.publish, light_platform.policies.check):
        arguments = {"name": "limits"} if attempt == light_platform.policies.publish else {}
        with pytest.raises(PolicyInvalid) as refused:
            attempt(**arguments, text=text)
        assert refused.value.faults

    assert light_platform.policies.list().items == ()


@pytest.mark.slow
def test_a_check_counts_rules_not_keywords(light_platform: OwnPlatform) -> None:
    text = '@id("forbid-what-others-permit") forbid (principal, action, resource) when { false };'

    assert light_platform.policies.check(text=text).rules == 1


def test_who_can_names_everyone_and_their_rule(light_platform: OwnPlatform, light_dana: Caller) -> None:
    light_platform.join("gone", Role.ADMIN)
    light_platform.users.disable("gone")
    light_platform.join("robot", Role.OPERATOR, kind="service")
    light_platform.join("vera", Role.VIEWER)

    answer = {
        each.principal: each.rule for each in light_platform.policies.who_can("blobs.delete", "blob:data")
    }

    assert {"dana": "role.developer", "robot": "role.operator"}.items() <= answer.items()
    assert not {"gone", "vera"} & set(answer)


def test_allowed_names_what_the_caller_may_do_now(light_platform: OwnPlatform, light_dana: Caller) -> None:
    asked = ("blobs.read", "blobs.delete", "blobs.commit", "no.such")

    with acting_as(light_dana):
        before = light_platform.policies.allowed(asked, "blob:data")
        with pytest.raises(NotFound):
            light_platform.policies.allowed(asked, "blob:none")
    light_platform.policies.publish(
        "frozen",
        text='forbid (principal, action == Action::"blobs.delete", resource) when { resource.name == "data" };',
    )

    assert "blobs.delete" not in light_platform.policies.allowed(asked, "blob:data")
    assert "blobs.read" in before
    assert "no.such" not in before
