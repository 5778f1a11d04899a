"""What a policy can never do, whatever it contains: take the platform from those who govern it, or give it away."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.control.services import all_operations
from falaj.errors import PolicyInvalid
from falaj.governance.operations.caller import acting_as
from falaj.governance.policy.engine import PolicyEngine, PolicyText, PrincipalFacts
from falaj.governance.policy.roles import is_governing
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, ObjectId, PrincipalId
from platforms import OwnPlatform

OPERATIONS = all_operations()
ERRS = "9223372036854775807 + 1 == 0"
TEAM = ObjectId("team")

KEEPERS = {
    "admin": PrincipalFacts("root", "root", "user", roles=((ROOT, Role.ADMIN),)),
    "auditor": PrincipalFacts("anna", "anna", "user", roles=((ROOT, Role.AUDITOR),)),
    "both": PrincipalFacts("both", "both", "user", roles=((ROOT, Role.ADMIN), (ROOT, Role.AUDITOR))),
}
DEVELOPER = PrincipalFacts("dana", "dana", "user", roles=((TEAM, Role.DEVELOPER),))
GUEST = PrincipalFacts("gus", "gus", "user")


def thing(kind: str) -> StoredObject:
    ident = TEAM if kind == "workspace" else ObjectId(f"{kind}-1")
    return StoredObject(
        id=ident,
        workspace=ObjectId(ROOT) if kind == "workspace" else TEAM,
        kind=kind,
        name=ident,
        owner=PrincipalId("dana"),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


GOVERNED = [
    (name, thing({"object": "blob"}.get(op.resource, op.resource)))
    for name, op in OPERATIONS.items()
    if is_governing(name) and op.resource in ("workspace", "policy", "object")
]

CONDITIONS = st.recursive(
    st.sampled_from(
        [
            ERRS,
            "true",
            "false",
            'principal == User::"root"',
            'principal in Role::"platform/admin"',
            'principal in Role::"platform/auditor"',
            "principal in resource.workspace.admin",
            'action in Action::"governing"',
            'resource.name like "*"',
            "resource.owner == principal.owner",
        ]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda c: f"!({c})"),
        st.tuples(inner, inner, inner).map(lambda t: f"(if {t[0]} then {t[1]} else {t[2]})"),
    ),
    max_leaves=6,
)
ACTIONS = st.sampled_from(
    [
        "action",
        'action in Action::"governing"',
        'action == Action::"policies.withdraw"',
        'action in [Action::"audit.list", Action::"workspaces.grant", Action::"blobs.read"]',
    ]
)
RULES = st.builds(
    lambda effect, who, action, kind, condition: (
        f"{effect} ({who}, {action}, resource) {kind} {{ {condition} }};"
    ),
    st.sampled_from(["permit", "forbid"]),
    st.sampled_from(["principal", 'principal == User::"root"', 'principal in Role::"platform/auditor"']),
    ACTIONS,
    st.sampled_from(["when", "unless"]),
    CONDITIONS,
)
POLICIES = st.lists(RULES, min_size=1, max_size=4).map("\n".join)


def engine(*policies: str, workspace: str | None = TEAM) -> PolicyEngine:
    texts = [PolicyText(f"policy:{n}@1", text, workspace) for n, text in enumerate(policies)]
    made = PolicyEngine(OPERATIONS.values(), texts)
    assert made.unusable == {}
    return made


WITHOUT = engine()


def allowed(made: PolicyEngine, who: PrincipalFacts, action: str, resource: StoredObject) -> bool:
    return made.decide(who, action, resource, home=thing("workspace")).allowed


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(POLICIES)
def test_no_policy_of_a_workspace_changes_the_governing_actions_of_the_platforms_keepers(text: str) -> None:
    made = engine(text)

    for name, keeper in KEEPERS.items():
        for action, resource in GOVERNED:
            expected = allowed(WITHOUT, keeper, action, resource)
            assert allowed(made, keeper, action, resource) == expected, (name, action)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(POLICIES)
def test_a_permit_that_errs_is_as_if_it_were_not_there(text: str) -> None:
    erring = f"permit (principal, action, resource) when {{ {ERRS} }};"
    without, made = engine(text), engine(text, erring)

    for who in (*KEEPERS.values(), DEVELOPER, GUEST):
        for action in ("blobs.read", "models.promote", "endpoints.infer"):
            resource = thing(OPERATIONS[action].resource)
            assert allowed(made, who, action, resource) == allowed(without, who, action, resource)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(POLICIES)
def test_a_forbid_that_errs_permits_nothing(text: str) -> None:
    forbid = f'forbid (principal, action == Action::"blobs.read", resource) when {{ {ERRS} }};'
    without, made = engine(text), engine(text, forbid)

    for who in (*KEEPERS.values(), DEVELOPER, GUEST):
        assert not allowed(made, who, "blobs.read", thing("blob"))
        model = thing("model_version")
        assert allowed(made, who, "models.promote", model) == allowed(without, who, "models.promote", model)


def test_policies_of_one_name_in_two_workspaces_both_hold() -> None:
    forbid = 'forbid (principal, action == Action::"blobs.read", resource);'
    texts = [PolicyText("policy:limits@1", forbid, workspace) for workspace in ("other", TEAM, "third")]

    made = PolicyEngine(OPERATIONS.values(), texts)

    assert not allowed(made, DEVELOPER, "blobs.read", thing("blob"))


# ------------------------------------------------------------------------------------- on a real platform


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["permit", "forbid"])
@pytest.mark.parametrize("condition", [ERRS, f'resource.name like "*" && {ERRS}', "true"])
def test_a_workspace_administrator_cannot_shut_out_platform_administrators_and_auditors(
    light_platform: OwnPlatform, effect: str, condition: str
) -> None:
    light_platform.workspaces.create("team")
    eve = light_platform.join("eve", Role.ADMIN, workspace="team")
    anna = light_platform.join("anna", Role.AUDITOR, workspace="platform")
    text = f'{effect} (principal, action, resource) when {{ principal != User::"{eve.id}" && {condition} }};'
    with acting_as(eve):
        light_platform.policies.publish("mine", text=text, workspace="team")

    with acting_as(anna):
        assert light_platform.audit.list(workspace="team").items
    assert "team" in [found.name for found in light_platform.workspaces.list().items]
    light_platform.workspaces.grant("team", "anna", role=Role.VIEWER)
    light_platform.policies.withdraw("team/mine")


@pytest.mark.slow
def test_a_permit_that_errs_leaves_a_workspace_open(light_platform: OwnPlatform) -> None:
    dana = light_platform.join("dana", Role.DEVELOPER)
    light_platform.put("data", b"bytes")

    light_platform.policies.publish("broken", text=f"permit (principal, action, resource) when {{ {ERRS} }};")

    with acting_as(dana):
        assert light_platform.get("data") == b"bytes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["permit (principal, action, resource) when { " + "(" * 200 + "true" + ")" * 200 + " };", "per", ""],
)
def test_a_stored_policy_that_is_not_valid_any_more_closes_its_workspace_and_nothing_else(
    light_platform: OwnPlatform, text: str
) -> None:
    light_platform.workspaces.create("other")
    dana = light_platform.join("dana", Role.DEVELOPER)
    light_platform.workspaces.grant("other", "dana", role=Role.DEVELOPER)
    for workspace in ("default", "other"):
        light_platform.put("data", b"bytes", workspace=workspace)
    light_platform.policies.publish("old", text="permit (principal, action, resource);", workspace="other")
    light_platform.sql("UPDATE governance_policies SET text = :text", {"text": text or "nonsense"})
    reopened = light_platform.again(as_owner=True)

    with acting_as(dana):
        assert reopened.get("data") == b"bytes"
        with pytest.raises(Exception, match=r"policy:old@1|no blob"):
            reopened.get("other/data")
    reopened.policies.withdraw("other/old")
    with acting_as(dana):
        assert reopened.get("other/data") == b"bytes"


def test_a_file_that_is_nested_too_deeply_stops_the_start() -> None:
    from falaj.governance.policy.authorizer import Authorizer

    deep = "permit (principal, action, resource) when { " + "(" * 5_000 + "true" + ")" * 5_000 + " };"

    with pytest.raises(PolicyInvalid, match="deeply"):
        Authorizer(OPERATIONS.values(), files=[PolicyText("deep.cedar", deep)])
