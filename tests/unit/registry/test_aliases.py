"""Aliases: moves, history, and approval of protected aliases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from falaj.errors import Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.governance.identity import Role
from falaj.records.registry import AliasMove
from falaj.registry import store
from falaj.registry.service import Models
from platforms import OwnPlatform

if TYPE_CHECKING:
    from conftest import Register  # type: ignore[attr-defined]

HOUR = timedelta(hours=1)


def champion(models: Models, *, at: datetime | None = None) -> str:
    return models.resolve("churn", alias="champion", at=at).reference


# --------------------------------------------------------------------------------------- history


def test_an_alias_keeps_its_history(platform: OwnPlatform, models: Models, register: Register) -> None:
    register(), register(), register()
    start = platform.clock.now
    moments = {}
    for number in (1, 3, 2):
        platform.clock.advance(HOUR)
        models.promote(f"churn@{number}", to="champion")
        moments[number] = platform.clock.now

    assert champion(models) == "churn@2"
    assert [champion(models, at=moments[n]) for n in (1, 3, 2)] == ["churn@1", "churn@3", "churn@2"]
    assert champion(models, at=moments[3] - timedelta(microseconds=1)) == "churn@1"
    with pytest.raises(NotFound, match="no champion at"):
        champion(models, at=start)
    history = models.alias_history("churn", alias="champion").items
    assert [(c.seq, c.version, c.previous, c.at) for c in history] == [
        (3, "churn@2", "churn@3", moments[2]),
        (2, "churn@3", "churn@1", moments[3]),
        (1, "churn@1", None, moments[1]),
    ]


def test_history_comes_in_pages(light_platform: OwnPlatform, models: Models, register: Register) -> None:
    register(), register()
    for number in (1, 2, 1):
        models.promote(f"churn@{number}", to="staging")

    first = models.alias_history("churn", alias="staging", limit=2)
    rest = models.alias_history("churn", alias="staging", limit=2, before=int(first.next))

    assert ([c.seq for c in first.items], [c.seq for c in rest.items], rest.next) == ([3, 2], [1], None)


def test_a_promotion_names_the_version_that_it_replaced(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(), register()
    models.promote("churn@1", to="champion")

    moved = models.promote("churn@2", to="champion")

    assert (moved.model, moved.change.version, moved.change.previous) == ("churn", "churn@2", "churn@1")
    (alias,) = models.show("churn").aliases
    assert (alias.alias, alias.version, alias.protected) == ("champion", "churn@2", False)


def test_an_alias_that_is_there_already_does_not_move(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()
    models.promote("churn@1", to="champion")

    with pytest.raises(Conflict, match="already"):
        models.promote("churn@1", to="champion")

    assert len(models.alias_history("churn", alias="champion").items) == 1


@pytest.mark.slow
def test_concurrent_promotions_are_all_in_the_history(
    platform: OwnPlatform, models: Models, register: Register
) -> None:
    for _ in range(6):
        register()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: models.promote(f"churn@{n}", to="champion"), range(1, 7)))

    history = models.alias_history("churn", alias="champion").items
    assert [change.seq for change in history] == [6, 5, 4, 3, 2, 1]
    assert [change.previous for change in history[:-1]] == [change.version for change in history[1:]]


@pytest.mark.parametrize("alias", ["", "14", "Champion", "a-b", "a..b", "x" * 65, "a@b"])
def test_an_alias_that_could_be_a_number_or_a_path_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register, alias: str
) -> None:
    register()

    with pytest.raises(InvalidInput):
        models.promote("churn@1", to=alias)


@pytest.mark.slow
def test_a_timestamp_without_a_time_zone_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()

    with pytest.raises(InvalidInput):
        champion(models, at=datetime(2026, 5, 3))  # noqa: DTZ001 - the fault that is tested


# -------------------------------------------------------------------------------------- rollback


def test_a_rollback_returns_to_the_previous_version(
    platform: OwnPlatform, models: Models, register: Register
) -> None:
    for number in (1, 2, 3):
        register()
        models.promote(f"churn@{number}", to="champion")

    back = models.rollback("churn", alias="champion")
    further = models.rollback("churn", alias="champion")

    assert (back.change.version, back.change.previous, back.change.move) == (
        "churn@2",
        "churn@3",
        AliasMove.ROLLBACK,
    )
    assert further.change.version == "churn@1" == champion(models)
    with pytest.raises(Conflict, match="no previous version"):
        models.rollback("churn", alias="champion")
    models.promote("churn@3", to="champion")
    assert models.rollback("churn", alias="champion").change.version == "churn@1"


@pytest.mark.parametrize("promoted", [0, 1])
def test_a_rollback_without_an_earlier_target_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register, promoted: int
) -> None:
    register()
    for _ in range(promoted):
        models.promote("churn@1", to="champion")

    with pytest.raises(Conflict):
        models.rollback("churn", alias="champion")


def test_a_rolled_back_version_needs_a_new_approval(
    platform: OwnPlatform, models: Models, register: Register, noor: Caller
) -> None:
    register(), register()
    models.protect("churn", alias="champion")
    for number in (1, 2):
        with acting_as(noor):
            models.approve(f"churn@{number}", alias="champion")
        models.promote(f"churn@{number}", to="champion")

    models.rollback("churn", alias="champion")

    with pytest.raises(Denied):
        models.promote("churn@2", to="champion")
    with acting_as(noor):
        models.approve("churn@2", alias="champion", comment="looked again")
    assert models.promote("churn@2", to="champion").approved_by == ("noor",)


@pytest.mark.slow
def test_a_rollback_does_not_return_to_what_was_there_before_the_protection(
    platform: OwnPlatform, models: Models, register: Register, dana: Caller, noor: Caller
) -> None:
    """Nobody has approved the author's first version: no approver, nor who protected the alias at the second."""
    with acting_as(dana):
        for number in (1, 2):
            register()
            models.promote(f"churn@{number}", to="champion")
        register()
    models.protect("churn", alias="champion")
    since = models.show("churn").aliases[0].since

    with acting_as(dana), pytest.raises(Conflict, match="no previous version"):
        models.rollback("churn", alias="champion")
    with acting_as(noor):
        models.approve("churn@3", alias="champion")
    models.promote("churn@3", to="champion")
    models.protect("churn", alias="champion", independent=True)  # changes nothing about the way back
    with acting_as(dana):
        back = models.rollback("churn", alias="champion")

    assert back.change.version == "churn@2"
    assert since == models.alias_history("churn", alias="champion").items[3].at
    with acting_as(dana), pytest.raises(Conflict, match="no previous version"):
        models.rollback("churn", alias="champion")


@pytest.mark.slow
def test_a_protection_whose_beginning_is_not_known_counts_from_approvals(
    light_platform: OwnPlatform, models: Models, register: Register, noor: Caller
) -> None:
    """As on a platform that protected the alias before it recorded when."""
    for number in (1, 2):
        register()
        models.promote(f"churn@{number}", to="champion")
    ident = models.show("churn").id
    with light_platform.database.write() as tx:
        store.protect_alias(tx, ident, "champion", independent=False)

    with pytest.raises(Denied, match="never approved"):
        models.rollback("churn", alias="champion")
    with acting_as(noor):
        models.approve("churn@1", alias="champion")

    assert models.rollback("churn", alias="champion").change.version == "churn@1"


@pytest.mark.slow
def test_a_rollback_does_not_return_to_a_version_that_was_rolled_back(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(), register(), register()
    for number in (1, 2, 1, 3, 2, 3):
        models.promote(f"churn@{number}", to="champion")

    found = [models.rollback("churn", alias="champion").change.version for _ in range(2)]

    assert found == ["churn@2", "churn@1"]
    with pytest.raises(Conflict, match="no previous version"):
        models.rollback("churn", alias="champion")


# ------------------------------------------------------------------------------------- approvals


@pytest.mark.slow
def test_the_author_of_the_original_does_not_approve_what_others_made_of_it(
    platform: OwnPlatform, models: Models, register: Register, dana: Caller, noor: Caller
) -> None:
    """As an optimization, which any developer may start, makes variants of a version."""
    omar = platform.join("omar", Role.DEVELOPER)
    with acting_as(dana):
        register()
    with acting_as(omar):
        register(sources=("model_version:churn@1",))
        register(sources=("model_version:churn@2",))

    for version in ("churn@2", "churn@3"):
        with acting_as(dana), pytest.raises(Denied, match="someone else must approve"):
            models.approve(version, alias="champion")
        with acting_as(noor):
            models.approve(version, alias="champion")


def test_a_protected_alias_names_the_missing_approval(
    light_platform: OwnPlatform, models: Models, register: Register, dana: Caller
) -> None:
    with acting_as(dana):
        register()
    models.protect("churn", alias="champion")

    with pytest.raises(Denied) as refused:
        models.promote("churn@1", to="champion")

    (fault,) = refused.value.faults
    assert fault.where == "approval of churn@1 for champion"
    assert fault.allowed is not None
    assert fault.allowed.startswith(
        "an approval by someone with the role approver, other than its author dana: nobody yet"
    )
    assert fault.fix == "falaj models approve churn@1 --alias champion"
    assert light_platform.entries()[-1]["outcome"] == "denied"
    with pytest.raises(NotFound):
        champion(models)


def test_an_author_cannot_approve_their_own_version(
    light_platform: OwnPlatform, models: Models, register: Register, dana: Caller, noor: Caller
) -> None:
    with acting_as(dana):
        register()
        with pytest.raises(Denied, match="someone else"):
            models.approve("churn@1", alias="champion")
    models.protect("churn", alias="champion")

    with acting_as(noor):
        models.approve("churn@1", alias="champion", comment="measured on June")
    with acting_as(dana):
        moved = models.promote("churn@1", to="champion")

    assert (moved.approved_by, moved.change.by) == (("noor",), "dana")


def test_the_owner_of_the_run_cannot_approve_its_model(
    light_platform: OwnPlatform, models: Models, register: Register, dana: Caller
) -> None:
    with acting_as(dana):
        run = light_platform.put("run", b"x")
    register(run=run.id)

    with acting_as(dana), pytest.raises(Denied):
        models.approve("churn@1", alias="champion")


def test_an_approval_is_for_one_version_and_one_alias(
    platform: OwnPlatform, models: Models, register: Register, noor: Caller
) -> None:
    register(), register()
    for alias in ("champion", "shadow"):
        models.protect("churn", alias=alias)
    with acting_as(noor):
        models.approve("churn@1", alias="champion")

    for version, alias in (("churn@2", "champion"), ("churn@1", "shadow")):
        with pytest.raises(Denied):
            models.promote(version, to=alias)

    assert models.promote("churn@1", to="champion").change.version == "churn@1"


def test_approving_twice_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register, noor: Caller
) -> None:
    register()
    with acting_as(noor):
        models.approve("churn@1", alias="champion")

        with pytest.raises(Conflict):
            models.approve("churn@1", alias="champion")


def test_who_made_a_service_account_or_its_token_does_not_approve_what_it_registers(
    light_platform: OwnPlatform, models: Models, register: Register, noor: Caller
) -> None:
    """A second account in one's own name is not another person."""
    admin = light_platform.join("dana", Role.ADMIN, Role.DEVELOPER, Role.APPROVER, workspace="platform")
    other = light_platform.join("omar", Role.ADMIN, Role.APPROVER, workspace="platform")
    with acting_as(admin):
        light_platform.users.create("robot", kind="service")
        light_platform.workspaces.grant("default", "robot", role=Role.DEVELOPER)
    with acting_as(other):
        secret = light_platform.tokens.issue(purpose="ci", user="robot").secret
    with acting_as(light_platform.caller_of(secret)):
        register()
    models.protect("churn", alias="champion")

    for person in (admin, other):
        with acting_as(person), pytest.raises(Denied, match="someone else must approve"):
            models.approve("churn@1", alias="champion")
    with pytest.raises(Denied) as refused:
        models.promote("churn@1", to="champion")

    assert refused.value.details["able"] == ["noor"]
    with acting_as(noor):
        assert models.approve("churn@1", alias="champion").by == "noor"


def test_another_token_of_ones_own_is_no_other_person(
    light_platform: OwnPlatform, models: Models, register: Register, dana: Caller
) -> None:
    with acting_as(dana):
        register()
        secret = light_platform.tokens.issue(purpose="approvals", actions=("models.*",)).secret

    with acting_as(light_platform.caller_of(secret)), pytest.raises(Denied, match="someone else"):
        models.approve("churn@1", alias="champion")


@pytest.mark.parametrize("alias", ["Champion", "CHAMPION", "champion ", "champıon"])
def test_an_alias_that_looks_like_a_protected_one_cannot_be_made(
    light_platform: OwnPlatform, models: Models, register: Register, alias: str
) -> None:
    register()
    models.protect("churn", alias="champion")

    for call in (
        lambda: models.promote("churn@1", to=alias),
        lambda: models.approve("churn@1", alias=alias),
        lambda: models.rollback("churn", alias=alias),
        lambda: models.set_gates("churn", alias=alias),
    ):
        with pytest.raises(InvalidInput, match="an alias is a-z"):
            call()
    with pytest.raises((InvalidInput, NotFound)):
        models.version("Churn@1")


@pytest.mark.slow
def test_two_people_who_promote_at_once_are_both_in_the_history_and_undone_one_by_one(
    platform: OwnPlatform, models: Models, register: Register, dana: Caller
) -> None:
    omar = platform.join("omar", Role.DEVELOPER)
    for _ in range(3):
        register()
    models.promote("churn@1", to="champion")

    def promote(given: tuple[Caller, str]) -> str:
        with acting_as(given[0]):
            return str(models.promote(given[1], to="champion").change.previous)

    with ThreadPoolExecutor(2) as pool:
        before = list(pool.map(promote, [(dana, "churn@2"), (omar, "churn@3")]))

    last, first, _ = models.alias_history("churn", alias="champion").items
    assert {(last.by, last.version), (first.by, first.version)} == {("dana", "churn@2"), ("omar", "churn@3")}
    assert sorted(before) == sorted(["churn@1", first.version])
    assert (last.previous, first.previous) == (first.version, "churn@1")
    assert models.rollback("churn", alias="champion").change.version == first.version
    assert models.rollback("churn", alias="champion").change.version == "churn@1"


def test_the_least_rights_see_history_and_evidence_and_move_nothing(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(), register()
    for number in (1, 2):
        models.promote(f"churn@{number}", to="champion")
    viewer, stranger = light_platform.join("vera", Role.VIEWER), light_platform.join("sven")

    with acting_as(viewer):
        assert models.alias("churn", "champion").version == "churn@2"
        assert [each.version for each in models.alias_history("churn", alias="champion").items] == [
            "churn@2",
            "churn@1",
        ]
        for call in (
            lambda: models.promote("churn@1", to="champion"),
            lambda: models.rollback("churn", alias="champion"),
            lambda: models.approve("churn@1", alias="champion"),
            lambda: models.protect("churn", alias="champion"),
            lambda: models.record_metrics("churn@1", on="x", metrics={"auc": 1.0}),
        ):
            with pytest.raises(Denied):
                call()
    with acting_as(stranger), pytest.raises(NotFound):
        models.alias("default/churn", "champion")
    assert champion(models) == "churn@2"


def test_a_service_account_does_not_approve(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()
    robot = light_platform.join("robot", Role.APPROVER, kind="service")

    with acting_as(robot), pytest.raises(Denied, match="only a person can approve"):
        models.approve("churn@1", alias="champion")


def test_not_even_an_administrator_approves_without_the_role(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()
    adam = light_platform.join("adam", Role.ADMIN)

    with acting_as(adam), pytest.raises(Denied) as refused:
        models.approve("churn@1", alias="champion")

    assert refused.value.details["needs"] == "approver"


def test_protecting_an_alias_leaves_it_where_it_is(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(), register()
    models.promote("churn@1", to="champion")

    alias = models.protect("churn", alias="champion")

    assert (alias.version, alias.protected) == ("churn@1", True)
    with pytest.raises(FalajError):
        models.promote("churn@2", to="champion")
    assert champion(models) == "churn@1"
