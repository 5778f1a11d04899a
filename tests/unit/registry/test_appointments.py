"""Approval by someone whom the author did not appoint: what is recorded of an approver, and what counts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from falaj.errors import Conflict, Denied
from falaj.governance.identity.tokens import redeem_link
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.governance.identity import Role
from falaj.records.registry import Approval
from falaj.registry.service import Models
from platforms import OwnPlatform

if TYPE_CHECKING:
    from conftest import Register  # type: ignore[attr-defined]


@pytest.fixture
def amal(light_platform: OwnPlatform) -> Caller:
    """A platform administrator who makes models, and did not make the platform."""
    return light_platform.join("amal", Role.ADMIN, workspace="platform")


@pytest.fixture
def churn(light_platform: OwnPlatform, models: Models, register: Register, amal: Caller) -> str:
    """A version by amal, whose alias champion demands an independent approver."""
    with acting_as(amal):
        register()
    models.protect("churn", alias="champion", independent=True)
    return "churn@1"


def approve(models: Models, caller: Caller, version: str = "churn@1") -> Approval:
    with acting_as(caller):
        return models.approve(version, alias="champion")


def signed_in(platform: OwnPlatform, by: Caller | None, user: str) -> Caller:
    """The caller `user`, with a token that `by` issued (None: the owner)."""
    if by is None:
        secret = platform.tokens.issue(user=user, purpose="test").secret
    else:
        with acting_as(by):
            secret = platform.tokens.issue(user=user, purpose="test").secret
    return platform.caller_of(secret)


def refused(models: Models, version: str = "churn@1") -> Denied:
    with pytest.raises(Denied) as denied:
        models.promote(version, to="champion")
    return denied.value


# ---------------------------------------------------------------------------------- what the author appointed


def test_an_administrator_does_not_approve_through_a_user_they_made(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    with acting_as(amal):
        light_platform.join("puppet", Role.APPROVER)
    made = light_platform.clock.now
    light_platform.clock.advance(timedelta(minutes=2))

    approval = approve(models, signed_in(light_platform, amal, "puppet"))

    found = approval.appointment
    assert found is not None
    assert (found.granted_by, found.granted_at, found.created_by) == (("amal",), made, ("amal",))
    assert found.credential_by == ("amal",)
    assert not approval.independent
    assert "whom the author did not appoint" in str(refused(models))
    assert models.approvals(churn, alias="champion").items == (approval,)


def test_a_chain_of_appointments_leads_back_to_the_author(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    with acting_as(amal):
        middle = light_platform.join("middle", Role.ADMIN, workspace="platform")
    with acting_as(middle):
        last = light_platform.join("last", Role.APPROVER)

    assert not approve(models, last).independent
    assert refused(models).details["able"] == []


@pytest.mark.slow
def test_membership_of_a_group_that_the_author_gave_does_not_count(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    light_platform.groups.create("approvers")
    light_platform.workspaces.grant("default", "approvers", role=Role.APPROVER)
    noor, omar = light_platform.join("noor"), light_platform.join("omar")
    light_platform.groups.add("approvers", "omar")
    with acting_as(amal):
        light_platform.groups.add("approvers", "noor")

    by_author, by_owner = approve(models, noor), approve(models, omar)

    assert (by_author.independent, by_owner.independent) == (False, True)
    assert by_author.appointment is not None
    assert (by_author.appointment.group, by_author.appointment.added_by) == (
        "approvers",
        ("amal", owner(light_platform)),
    )
    assert models.promote(churn, to="champion").approved_by == ("omar",)


@pytest.mark.slow
def test_a_grant_to_a_group_by_the_author_does_not_count(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    light_platform.groups.create("team")
    noor = light_platform.join("noor")
    light_platform.groups.add("team", "noor")
    with acting_as(amal):
        light_platform.workspaces.grant("default", "team", role=Role.APPROVER)

    assert not approve(models, noor).independent


@pytest.mark.slow
def test_a_token_or_a_link_that_the_author_issued_does_not_count(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    light_platform.join("noor", Role.APPROVER)
    with acting_as(amal):
        link = light_platform.tokens.sign_in_link(user="noor")
    with light_platform.database.write() as tx:
        digest = light_platform.parts.audit.digest
        by_link = redeem_link(tx, link.code, now=light_platform.clock(), origin="test", digest=digest)
    by_token = signed_in(light_platform, amal, "noor")
    with acting_as(by_token):
        second = light_platform.tokens.issue(purpose="from the first").secret

    first = approve(models, by_link)
    with pytest.raises(Conflict):
        approve(models, by_token)
    with pytest.raises(Conflict):
        approve(models, light_platform.caller_of(second))
    refused(models)
    again = approve(models, signed_in(light_platform, None, "noor"))

    assert (first.independent, again.independent) == (False, True)
    assert models.approvals(churn, alias="champion").items == (again,)
    assert models.promote(churn, to="champion").approved_by == ("noor",)


@pytest.mark.slow
def test_acting_as_another_administrator_does_not_hide_the_author(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    light_platform.join("other-admin", Role.ADMIN, workspace="platform")
    with acting_as(signed_in(light_platform, amal, "other-admin")):
        puppet = light_platform.join("puppet", Role.APPROVER)

    approval = approve(models, puppet)

    assert approval.appointment is not None
    assert approval.appointment.granted_by == ("other-admin", "amal")
    assert not approval.independent


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["service", "user"])
def test_an_author_who_is_somebodys_puppet_counts_as_that_person(
    light_platform: OwnPlatform, models: Models, register: Register, amal: Caller, kind: str
) -> None:
    with acting_as(amal):
        light_platform.join("ci", Role.DEVELOPER, kind=kind)  # type: ignore[arg-type]
        light_platform.join("puppet", Role.APPROVER)
        light_platform.workspaces.grant("default", "amal", role=Role.APPROVER)
    noor = light_platform.join("noor", Role.APPROVER)
    with acting_as(signed_in(light_platform, amal, "ci")):
        register()
    models.protect("churn", alias="champion", independent=True)

    puppet = light_platform.caller_of(light_platform.tokens.issue(user="puppet", purpose="x").secret)
    if kind == "service":  # it acts for her: she is its author, and cannot approve at all
        with pytest.raises(Denied, match="someone else must approve"):
            approve(models, amal)
        approvers = [puppet, noor]
    else:
        approvers = [puppet, amal, noor]
    found = [approve(models, who).independent for who in approvers]

    assert found == [False] * (len(approvers) - 1) + [True]


@pytest.mark.slow
def test_the_owner_of_a_home_who_appointed_everyone_has_no_independent_approver(
    light_platform: OwnPlatform, models: Models, register: Register, amal: Caller
) -> None:
    register()
    models.protect("churn", alias="champion", independent=True)
    with acting_as(amal):
        noor = light_platform.join("noor", Role.APPROVER)

    assert not approve(models, noor).independent
    assert "nobody yet" in str(refused(models))


@pytest.mark.slow
def test_a_policy_that_permits_approval_is_no_appointment(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    eve = light_platform.join("eve", Role.VIEWER)
    text = f'permit (principal == User::"{eve.id}", action == Action::"models.approve", resource);'
    with acting_as(amal):
        light_platform.policies.publish("more", text=text)

    approval = approve(models, eve)

    assert (approval.independent, approval.appointment) == (False, None)


@pytest.mark.slow
def test_what_was_not_recorded_does_not_count(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    noor = light_platform.join("noor", Role.APPROVER)
    light_platform.sql("UPDATE governance_grants SET granted_by = NULL, granted_at = NULL")
    light_platform.sql("UPDATE governance_principals SET created_by = NULL")

    approval = approve(models, noor)

    assert not approval.independent
    assert approval.appointment is not None
    assert approval.appointment.granted_by is None


# ---------------------------------------------------------------------------------------------- what counts


@pytest.mark.slow
def test_an_approver_whom_somebody_else_appointed_counts(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    light_platform.join("noor", Role.APPROVER)
    with acting_as(amal):  # a second way to the role takes nothing from the first
        light_platform.workspaces.grant("platform", "noor", role=Role.APPROVER)
    assert refused(models).details["able"] == ["noor"]

    approval = approve(models, signed_in(light_platform, None, "noor"))

    assert approval.independent
    assert models.promote(churn, to="champion").approved_by == ("noor",)


def test_an_administrator_who_appoints_themselves_may_approve_for_others(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    bilal = light_platform.join("bilal", Role.ADMIN, workspace="platform")
    with acting_as(bilal):
        light_platform.workspaces.grant("default", "bilal", role=Role.APPROVER)

    assert approve(models, bilal).independent


@pytest.mark.slow
def test_without_the_demand_any_other_approver_counts_and_the_appointment_is_recorded(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()
    models.protect("churn", alias="champion")
    noor = light_platform.join("noor", Role.APPROVER)

    approval = approve(models, noor)

    assert approval.appointment is not None
    assert approval.appointment.granted_by == (owner(light_platform),)
    assert models.promote("churn@1", to="champion").approved_by == ("noor",)


@pytest.mark.slow
def test_a_protection_that_demands_independence_stays_so(
    light_platform: OwnPlatform, models: Models, amal: Caller, churn: str
) -> None:
    with acting_as(amal):
        shown = models.protect("churn", alias="champion")

    assert (shown.protected, shown.independent) == (True, True)


def owner(platform: OwnPlatform) -> str:
    return platform.users.whoami().principal.name
