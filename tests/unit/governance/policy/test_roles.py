"""Permissions of each role, the text of a denial, and that unknown and forbidden objects look alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from falaj.control.services import all_operations
from falaj.errors import Denied, FalajError, NotFound
from falaj.governance.operations.caller import Caller, acting_as
from falaj.governance.policy.engine import PolicyEngine, PrincipalFacts
from falaj.governance.policy.roles import INCLUDES
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, ObjectId, PrincipalId
from falaj.records.record import utc_now
from platforms import OwnPlatform

ENGINE = PolicyEngine(all_operations().values())
HARMLESS = 'forbid (principal, action == Action::"blobs.read", resource) when { resource.name == "nothing" };'

EVERYONE = set(Role)
WRITERS = {Role.DEVELOPER, Role.OPERATOR, Role.ADMIN}
DOCUMENTED: dict[str, tuple[set[Role], Callable[[OwnPlatform], Any]]] = {
    "users.list": (EVERYONE, lambda p: p.users.list()),
    "workspaces.show": (EVERYONE, lambda p: p.workspaces.show("default")),
    "blobs.read": (EVERYONE, lambda p: p.get("data")),
    "blobs.upload": (WRITERS, lambda p: p.blobs.upload(iter([b"x"]))),
    "objects.label": (WRITERS, lambda p: p.objects.label("blob:data", classes=("pii",))),
    "objects.unlabel": ({Role.ADMIN}, lambda p: p.objects.unlabel("blob:data")),
    "policies.publish": ({Role.ADMIN}, lambda p: p.policies.publish("rule", text=HARMLESS)),
    "policies.who_can": ({Role.AUDITOR, Role.ADMIN}, lambda p: p.policies.who_can("blobs.read", "blob:data")),
    "audit.list": ({Role.AUDITOR}, lambda p: p.audit.list(workspace="default")),
    "workspaces.grant": ({Role.ADMIN}, lambda p: p.workspaces.grant("default", "guest", role=Role.VIEWER)),
    "keys.destroy": ({Role.ADMIN}, lambda p: p.keys.destroy("default")),
    "workspaces.create": (set(), lambda p: p.workspaces.create("other")),
    "users.create": (set(), lambda p: p.users.create("other")),
    "blobs.cleanup": (set(), lambda p: p.blobs.cleanup()),
    "features.cleanup": (set(), lambda p: p.features.cleanup()),
    "audit.verify": (set(), lambda p: p.audit.verify()),
    "keys.rotate": (set(), lambda p: p.keys.rotate()),
}


@pytest.mark.parametrize("role", Role)
def test_a_role_in_a_workspace_may_do_what_is_documented(light_platform: OwnPlatform, role: Role) -> None:
    light_platform.put("data", b"bytes")
    light_platform.users.create("guest")
    holder = light_platform.join("holder", role)

    with acting_as(holder):
        allowed = {action for action, (_, act) in DOCUMENTED.items() if is_allowed(light_platform, act)}

    assert allowed == {action for action, (roles, _) in DOCUMENTED.items() if role in roles}


@pytest.mark.parametrize("role", Role)
def test_every_operation_follows_the_roles_that_it_names(role: Role) -> None:
    there = thing("workspace_a")
    holder = PrincipalFacts("user_h", "holder", "user", (), (("workspace_a", role),))

    answers = {op.name: ENGINE.decide(holder, op.name, there).allowed for op in operations_on_objects()}

    assert answers == {
        op.name: bool(INCLUDES[role] & op.allow) or "anyone" in op.allow for op in operations_on_objects()
    }


@pytest.mark.parametrize("role", Role)
def test_a_role_at_the_platform_holds_in_every_workspace_and_one_elsewhere_does_not(role: Role) -> None:
    everywhere = PrincipalFacts("user_e", "e", "user", (), ((ROOT, role),))
    elsewhere = PrincipalFacts("user_f", "f", "user", (), (("workspace_b", role),))
    there = thing("workspace_a")

    for op in operations_on_objects():
        if "anyone" not in op.allow:
            assert ENGINE.decide(everywhere, op.name, there).allowed == bool(INCLUDES[role] & op.allow)
            assert not ENGINE.decide(elsewhere, op.name, there).allowed


def test_an_owner_may_show_their_own_objects_without_a_role() -> None:
    owner = PrincipalFacts("user_o", "o", "user")

    assert ENGINE.decide(owner, "objects.show", thing("workspace_a", owner="user_o")).rule == "owner"
    assert not ENGINE.decide(owner, "blobs.read", thing("workspace_a", owner="user_o")).allowed


def test_an_unknown_action_is_denied() -> None:
    admin = PrincipalFacts("user_a", "a", "user", (), ((ROOT, Role.ADMIN),))

    assert not ENGINE.decide(admin, "blob.fly", thing("workspace_a")).allowed


def test_a_denial_names_the_rule_and_the_roles_that_would_be_allowed(platform: OwnPlatform) -> None:
    vera = platform.join("vera", Role.VIEWER)
    platform.put("data", b"bytes")

    with acting_as(vera), pytest.raises(Denied) as denied:
        platform.blobs.delete("data")

    expected = {"rule": "default", "action": "blobs.delete", "needs": "developer or operator or admin"}
    assert denied.value.details | expected == denied.value.details
    assert denied.value.details["roles"] == ["developer", "operator", "admin"]
    assert "vera may not blobs.delete on blob:data" in denied.value.message
    assert platform.entries()[-1]["rule"] == "default"


def test_granting_and_revoking_a_role_takes_effect_at_once(platform: OwnPlatform) -> None:
    platform.put("data", b"bytes")
    vera = platform.join("vera")

    def reads() -> bool:
        with acting_as(vera):
            return is_allowed(platform, lambda p: p.get("data"))

    before = reads()
    platform.workspaces.grant("default", "vera", role=Role.VIEWER)
    granted = reads()
    platform.workspaces.revoke("default", "vera", role=Role.VIEWER)

    assert (before, granted, reads()) == (False, True, False)


# ----------------------------------------------------------------- unknown and forbidden objects look alike


@pytest.fixture
def stranger(light_platform: OwnPlatform) -> Caller:
    """Return a user of another workspace than `secret`, which has a blob and a policy."""
    light_platform.workspaces.create("secret")
    light_platform.put("plans", b"bytes", workspace="secret")
    light_platform.policies.publish("rule", text=HARMLESS, workspace="secret")
    return light_platform.join("eve", Role.ADMIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "hidden", "unknown"),
    [
        pytest.param(lambda p, ref: p.workspaces.show(ref), "secret", "nowhere", id="workspaces.show"),
        pytest.param(lambda p, ref: p.workspaces.roles(ref), "secret", "nowhere", id="workspaces.roles"),
        pytest.param(lambda p, ref: p.blobs.list(workspace=ref), "secret", "nowhere", id="blobs.list"),
        pytest.param(
            lambda p, ref: p.blobs.upload(iter([b"x"]), workspace=ref), "secret", "nowhere", id="blobs.upload"
        ),
        pytest.param(
            lambda p, ref: p.workspaces.grant(ref, "eve", role=Role.VIEWER),
            "secret",
            "nowhere",
            id="workspaces.grant",
        ),
        pytest.param(
            lambda p, ref: p.workspaces.grant(ref, "nobody", role=Role.VIEWER),
            "secret",
            "nowhere",
            id="workspaces.grant-to-nobody",
        ),
        pytest.param(lambda p, ref: p.keys.destroy(ref), "secret", "nowhere", id="keys.destroy"),
        pytest.param(lambda p, ref: p.blobs.show(ref), "secret/plans", "secret/nothing", id="blobs.show"),
        pytest.param(lambda p, ref: p.blobs.delete(ref), "secret/plans", "nowhere/plans", id="blobs.delete"),
        pytest.param(
            lambda p, ref: p.policies.show(ref), "secret/rule", "secret/nothing", id="policies.show"
        ),
        pytest.param(
            lambda p, ref: p.objects.show(ref), "secret/blob:plans", "secret/blob:nothing", id="objects.show"
        ),
        pytest.param(
            lambda p, ref: p.lineage.graph(ref),
            "secret/blob:plans",
            "secret/blob:nothing",
            id="lineage.graph",
        ),
        pytest.param(
            lambda p, ref: p.zones.check(ref, "local"),
            "secret/blob:plans",
            "nowhere/blob:plans",
            id="zones.check",
        ),
        pytest.param(
            lambda p, ref: p.blobs.upload(iter([b"x"]), sources=(ref,)),
            "secret/blob:plans",
            "secret/blob:x",
            id="upload-from-one",
        ),
        pytest.param(
            lambda p, ref: p.blobs.upload(iter([]), sources=(ref, "blob:x")),
            "secret/blob:plans",
            "blob:y",
            id="upload-from-two",
        ),
    ],
)
def test_hidden_objects_look_unknown(
    light_platform: OwnPlatform,
    stranger: Caller,
    ask: Callable[[OwnPlatform, str], Any],
    hidden: str,
    unknown: str,
) -> None:
    with acting_as(stranger):
        assert refusal(light_platform, ask, hidden) == refusal(light_platform, ask, unknown)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [lambda p, ref: p.blobs.show(ref), lambda p, ref: p.objects.show(ref)])
def test_an_id_of_another_workspace_looks_unknown(
    light_platform: OwnPlatform, stranger: Caller, ask: Callable[[OwnPlatform, str], Any]
) -> None:
    ident = light_platform.blobs.show("secret/plans").id
    invented = ident[:-4] + ("0000" if ident[-4:] != "0000" else "1111")

    with acting_as(stranger):
        assert refusal(light_platform, ask, ident) == refusal(light_platform, ask, invented)


@pytest.mark.slow
def test_lists_show_nothing_of_other_workspaces(light_platform: OwnPlatform, stranger: Caller) -> None:
    with acting_as(stranger):
        assert [each.name for each in light_platform.workspaces.list().items] == ["default"]
        assert light_platform.objects.list("blob").items == ()


def refusal(platform: OwnPlatform, ask: Callable[[OwnPlatform, str], Any], reference: str) -> tuple[Any, ...]:
    """Return the error that a caller gets, without the name that it gave."""
    with pytest.raises(NotFound) as refused:
        ask(platform, reference)
    error = refused.value
    details = {name: "?" if value == reference else value for name, value in error.details.items()}
    return type(error), str(error).replace(repr(reference), "?"), details


def is_allowed(platform: OwnPlatform, act: Callable[[OwnPlatform], Any]) -> bool:
    try:
        act(platform)
    except (Denied, NotFound):
        return False
    except FalajError:
        return True
    return True


def operations_on_objects() -> list[Any]:
    return [op for op in all_operations().values() if op.name != "objects.show"]


def thing(workspace: str, *, owner: str = "user_x") -> StoredObject:
    return StoredObject(
        id=ObjectId("blob_x"),
        workspace=ObjectId(workspace),
        kind="blob",
        name="x",
        owner=PrincipalId(owner),
        created_at=utc_now(),
    )
