"""Workspaces, users, service accounts, groups and the roles they hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from falaj.errors import AlreadyExists, Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.names import ROOT
from platforms import OwnPlatform


def owner(platform: OwnPlatform) -> str:
    return platform.users.whoami().principal.name


def administrators(platform: OwnPlatform) -> list[str]:
    """Return who may administer the platform now."""
    return [each.principal for each in platform.policies.who_can("users.create", ROOT)]


def test_a_new_home_has_one_administrator_and_one_workspace(platform: OwnPlatform) -> None:
    me = platform.users.whoami()

    assert {(grant.workspace, grant.role) for grant in me.grants} == {
        ("platform", Role.ADMIN),
        ("platform", Role.AUDITOR),
    }
    assert {each.name for each in platform.workspaces.list().items} == {"platform", "default"}
    assert [each.name for each in platform.users.list().items if each.kind == "user"] == [me.principal.name]


def test_the_creator_of_a_workspace_administers_it(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("team-a")

    (grant,) = light_platform.workspaces.roles("team-a")

    assert (grant.subject, grant.role) == (owner(light_platform), Role.ADMIN)


@pytest.mark.parametrize("name", ["platform", "default"])
def test_workspace_names_are_unique(light_platform: OwnPlatform, name: str) -> None:
    with pytest.raises(AlreadyExists):
        light_platform.workspaces.create(name)


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "-a", "a-", "a..b", "é", "a" * 129, "a\n", "a\x00b"])
def test_invalid_names_are_refused(light_platform: OwnPlatform, name: str) -> None:
    with pytest.raises(InvalidInput):
        light_platform.workspaces.create(name)
    with pytest.raises(InvalidInput):
        light_platform.users.create(name)


def test_a_new_user_has_no_access(platform: OwnPlatform) -> None:
    dana = platform.join("dana")

    with acting_as(dana):
        assert platform.users.whoami().grants == ()
        assert platform.workspaces.list().items == ()
        with pytest.raises(NotFound):
            platform.blobs.list()
        with pytest.raises(Denied):
            platform.users.create("eve")


def test_users_and_service_accounts_share_one_namespace(light_platform: OwnPlatform) -> None:
    light_platform.users.create("dana")
    light_platform.users.create("robot", kind="service")

    for name, kind in (("dana", "user"), ("dana", "service"), ("robot", "user")):
        with pytest.raises(Conflict):
            light_platform.users.create(name, kind=kind)
    assert light_platform.users.show("robot").kind == "service"


def test_a_group_gives_its_role_to_its_members_while_they_are_in_it(platform: OwnPlatform) -> None:
    platform.put("data", b"bytes")
    dana = platform.join("dana")
    platform.groups.create("analysts")
    platform.workspaces.grant("default", "analysts", role=Role.VIEWER)

    def reads() -> bool:
        with acting_as(dana):
            try:
                return platform.get("data") == b"bytes"
            except FalajError:
                return False

    before = reads()
    group = platform.groups.add("analysts", "dana")
    inside = reads()
    with acting_as(dana):
        grants = platform.users.whoami().grants
    platform.groups.remove("analysts", "dana")

    assert (before, inside, reads()) == (False, True, False)
    assert group.members == ("dana",)
    assert [(grant.subject, grant.role) for grant in grants] == [("analysts", Role.VIEWER)]


def test_granting_and_adding_are_idempotent(light_platform: OwnPlatform) -> None:
    light_platform.users.create("dana")
    light_platform.groups.create("analysts")
    for _ in range(2):
        light_platform.workspaces.grant("default", "dana", role=Role.VIEWER)
        light_platform.groups.add("analysts", "dana")

    assert [grant.subject for grant in light_platform.workspaces.roles("default")] == ["dana"]
    assert light_platform.groups.list().items[0].members == ("dana",)


def test_a_role_that_is_not_held_cannot_be_revoked(light_platform: OwnPlatform) -> None:
    light_platform.users.create("dana")

    with pytest.raises(Conflict):
        light_platform.workspaces.revoke("default", "dana", role=Role.VIEWER)


def test_an_administrator_of_a_workspace_grants_there_and_nowhere_else(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("other")
    dana = light_platform.join("dana", Role.ADMIN)
    light_platform.users.create("eve")

    with acting_as(dana):
        light_platform.workspaces.grant("default", "eve", role=Role.VIEWER)
        with pytest.raises(NotFound):
            light_platform.workspaces.grant("other", "dana", role=Role.ADMIN)
        with pytest.raises(Denied):
            light_platform.workspaces.grant("platform", "dana", role=Role.ADMIN)


# ------------------------------------------------------------------------------------ disable, last admin


def test_a_disabled_user_is_refused_until_enabled_again(platform: OwnPlatform) -> None:
    platform.join("dana", Role.VIEWER)
    secret = platform.tokens.issue(purpose="ci", user="dana").secret

    disabled = platform.users.disable("dana")
    with pytest.raises(FalajError):
        platform.caller_of(secret)
    enabled = platform.users.enable("dana")

    assert (disabled.disabled, enabled.disabled) == (True, False)
    assert platform.caller_of(secret).name == "dana"


def test_users_cannot_disable_themselves(light_platform: OwnPlatform) -> None:
    with pytest.raises(Conflict):
        light_platform.users.disable(owner(light_platform))


def test_the_last_administrator_stays(platform: OwnPlatform) -> None:
    me = owner(platform)

    with pytest.raises(Conflict, match="last administrator"):
        platform.workspaces.revoke("platform", me, role=Role.ADMIN)

    assert administrators(platform) == [me]


def test_an_administrator_steps_down_when_there_is_another(platform: OwnPlatform) -> None:
    dana = platform.join("dana", Role.ADMIN, workspace="platform")

    platform.workspaces.revoke("platform", owner(platform), role=Role.ADMIN)

    with acting_as(dana):
        assert administrators(platform) == ["dana"]


def empty_group(platform: OwnPlatform) -> None:
    platform.groups.create("nobody")
    platform.workspaces.grant("platform", "nobody", role=Role.ADMIN)


def disabled_user(platform: OwnPlatform) -> None:
    platform.join("gone", Role.ADMIN, workspace="platform")
    platform.users.disable("gone")


@pytest.mark.parametrize("stand_in", [empty_group, disabled_user])
def test_the_last_administrator_who_can_act_stays(light_platform: OwnPlatform, stand_in) -> None:
    me = owner(light_platform)
    stand_in(light_platform)

    with pytest.raises(Conflict):
        light_platform.workspaces.revoke("platform", me, role=Role.ADMIN)

    assert administrators(light_platform) == [me]


def test_the_last_administrator_does_not_leave_through_a_group(light_platform: OwnPlatform) -> None:
    me = owner(light_platform)
    light_platform.groups.create("admins")
    light_platform.groups.add("admins", me)
    light_platform.workspaces.grant("platform", "admins", role=Role.ADMIN)
    light_platform.workspaces.revoke("platform", me, role=Role.ADMIN)

    with pytest.raises(Conflict):
        light_platform.groups.remove("admins", me)

    assert administrators(light_platform) == [me]


def test_of_two_concurrently_leaving_administrators_one_stays(platform: OwnPlatform) -> None:
    dana = platform.join("dana", Role.ADMIN, workspace="platform")
    names = [owner(platform), "dana"]

    def leave(name: str) -> bool:
        with acting_as(dana):
            try:
                platform.workspaces.revoke("platform", name, role=Role.ADMIN)
            except FalajError:
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        left = list(pool.map(leave, names))

    assert sorted(left) == [False, True]
