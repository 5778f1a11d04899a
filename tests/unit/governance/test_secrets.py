"""Secrets: no operation returns a value, no record has it, and only permitted users may use it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import falaj as fj
from falaj.assembly.platform import local_caller
from falaj.control.services import all_operations
from falaj.errors import Conflict, Denied, FalajError, InvalidInput, KeyReused, KeyUnavailable, NotFound
from falaj.governance import objects
from falaj.governance.operations.caller import Caller, acting_as, current_caller
from falaj.governance.secrets.service import Secrets, open_secrets
from falaj.governance.tables import secrets
from falaj.records.governance.identity import Role
from falaj.records.names import ObjectId
from platforms import OwnPlatform

PIN = "pin:4711"
FORBID = (
    'forbid (principal, action == Action::"secrets.use", resource) when { resource.name == "production" };'
)


def opened(platform: OwnPlatform, given: dict[str, str], *, workspace: str = "default") -> dict[str, str]:
    service: Secrets = platform.parts.services.secrets
    home = ObjectId(platform.workspaces.show(workspace).id)
    with acting_as(for_a_job(platform)):
        return open_secrets(service, given, workspace=home)


def for_a_job(platform: OwnPlatform) -> Caller:
    """Act as the controller on behalf of the present caller, as for the owner of a job."""
    return replace(current_caller() or local_caller(platform.database), origin="job:test")


def test_a_secret_is_set_listed_opened_for_a_job_and_removed(platform: OwnPlatform) -> None:
    made = platform.secrets.set("database", PIN)

    assert platform.secrets.list().items == (made,)
    assert made.set_by == platform.users.whoami().principal.name
    assert opened(platform, {"PASSWORD": "database", "AGAIN": "secret:database"}) == {
        "PASSWORD": PIN,
        "AGAIN": PIN,
    }
    platform.secrets.remove("database")
    assert platform.secrets.list().items == ()
    assert platform.count(secrets) == 0
    with pytest.raises(NotFound, match="there is no secret 'database'"):
        opened(platform, {"PASSWORD": "database"})


def test_a_new_value_takes_the_place_of_the_old_one(platform: OwnPlatform) -> None:
    first = platform.secrets.set("database", "old")

    second = platform.secrets.set("database", "newer 🗝 value\nof two lines\n")

    assert second.id == first.id
    assert opened(platform, {"A": "database"}) == {"A": "newer 🗝 value\nof two lines\n"}
    assert platform.count(secrets) == 1


def test_no_record_has_the_value_or_a_plain_digest_of_it(platform: OwnPlatform) -> None:
    platform.secrets.set("database", PIN)
    with platform.as_controller():
        platform.secrets.use("database")
    platform.secrets.set("database", "4712")

    dumped = json.dumps([platform.entries(), platform.secrets.list().model_dump(mode="json")])
    first, second = (entry["input"] for entry in platform.entries() if entry["action"] == "secrets.set")
    (sealed,) = (bytes(row["sealed"]) for row in platform.rows(secrets))
    assert PIN not in dumped
    assert first == second  # the digest covers the name only, so the value cannot be guessed from it
    assert b"4712" not in sealed


def test_no_operation_answers_with_a_value() -> None:
    answers = [op for op in all_operations().values() if op.group == "secrets"]

    assert {op.verb for op in answers} == {"set", "list", "use", "remove"}
    assert [op.name for op in answers if '"value"' in json.dumps(op.output.json_schema())] == []


@pytest.mark.parametrize(
    "value", ["", "x" * 65_537, "é" * 40_000, "with\0nul"], ids=["empty", "long", "wide", "nul"]
)
def test_an_invalid_value_is_refused_without_being_shown(light_platform: OwnPlatform, value: str) -> None:
    with pytest.raises(InvalidInput, match=r"1 to 65,536 bytes") as refused:
        light_platform.secrets.set("database", value)

    assert [fault.given for fault in refused.value.faults] == [None]
    assert light_platform.secrets.list().items == ()


def test_a_value_in_the_wrong_place_is_not_shown_either(light_platform: OwnPlatform) -> None:
    operation = all_operations()["secrets.set"]

    for body in (
        b'{"name": "a", "vaule": "hunter2"}',
        b'{"name": "a", "value": "hunter2',
        b'{"value": ["hunter2"]}',
    ):
        with pytest.raises(InvalidInput) as refused:
            operation.check_json(body)
        assert "hunter2" not in str(refused.value)


def test_one_key_with_two_values_is_two_calls(platform: OwnPlatform) -> None:
    with fj.once(key="once"):
        first = platform.secrets.set("database", "a")
        assert platform.secrets.set("database", "a") == first
        with pytest.raises(KeyReused):
            platform.secrets.set("database", "b")

    assert opened(platform, {"A": "database"}) == {"A": "a"}


def test_destroying_the_key_erases_the_secrets_of_a_workspace(platform: OwnPlatform) -> None:
    platform.workspaces.create("risk")
    platform.secrets.set("database", PIN, workspace="risk")
    platform.secrets.set("other", PIN)

    platform.keys.destroy("risk")

    with pytest.raises(KeyUnavailable):
        opened(platform, {"A": "database"}, workspace="risk")
    with pytest.raises(KeyUnavailable):
        platform.secrets.set("database", PIN, workspace="risk")
    assert opened(platform, {"A": "other"}) == {"A": PIN}


def test_a_sealed_value_cannot_be_moved_to_another_name(platform: OwnPlatform) -> None:
    platform.secrets.set("mine", "mine")
    platform.secrets.set("theirs", "theirs")
    ids = {each.name: each.id for each in platform.secrets.list().items}

    platform.sql(
        "UPDATE governance_secrets SET sealed = (SELECT sealed FROM governance_secrets WHERE id = :theirs) "
        "WHERE id = :mine",
        {"mine": ids["mine"], "theirs": ids["theirs"]},
    )

    with pytest.raises(FalajError, match="altered or moved"):
        opened(platform, {"A": "mine"})


def test_policies_decide_who_may_use_a_secret(platform: OwnPlatform) -> None:
    platform.secrets.set("production", PIN)
    platform.secrets.set("trial", PIN)
    dana, vera = platform.join("dana", Role.DEVELOPER), platform.join("vera", Role.VIEWER)
    platform.policies.publish("careful", text=FORBID, workspace="default")

    with acting_as(dana):
        assert opened_as(platform, "trial") == {"A": PIN}
        with pytest.raises(Denied, match=r"may not secrets\.use"):
            opened_as(platform, "production")
    with acting_as(vera):
        assert [each.name for each in platform.secrets.list().items] == ["production", "trial"]
        with pytest.raises(Denied):
            opened_as(platform, "trial")
        with pytest.raises(Denied):
            platform.secrets.set("trial", "hers")
    denied = [entry for entry in platform.entries() if entry["outcome"] == "denied"]
    assert [entry["action"] for entry in denied] == ["secrets.use", "secrets.use", "secrets.set"]


def opened_as(platform: OwnPlatform, name: str) -> dict[str, str]:
    """Open a secret on behalf of the present caller, as the controller does for the owner of a job."""
    service: Secrets = platform.parts.services.secrets
    with platform.database.read() as tx:
        home = objects.resolve(tx, "default", kind="workspace", workspace="platform").id
    with acting_as(for_a_job(platform)):
        return open_secrets(service, {"A": name}, workspace=home)


@pytest.mark.slow
def test_a_secret_that_may_not_be_removed_is_not_replaced(platform: OwnPlatform) -> None:
    platform.secrets.set("production", PIN)
    dana = platform.join("dana", Role.DEVELOPER)
    text = FORBID.replace("secrets.use", "secrets.remove")
    platform.policies.publish("careful", text=text, workspace="default")

    with acting_as(dana), pytest.raises(Denied, match=r"may not secrets\.remove"):
        platform.secrets.set("production", "another")

    assert opened(platform, {"A": "production"}) == {"A": PIN}


def test_other_users_cannot_tell_whether_a_secret_exists(platform: OwnPlatform) -> None:
    platform.secrets.set("production", PIN)
    sam = platform.join("sam")

    with acting_as(replace(sam, origin="job:of-sam")):
        for name in ("production", "nothing"):
            with pytest.raises(NotFound, match=f"there is no secret '{name}', or you may not see it"):
                platform.secrets.use(name)


def test_a_secret_of_another_workspace_is_named_with_it(platform: OwnPlatform) -> None:
    platform.workspaces.create("risk")
    platform.secrets.set("database", "of risk", workspace="risk")
    platform.secrets.set("database", "of default")

    assert opened(platform, {"A": "database", "B": "default/database"}, workspace="risk") == {
        "A": "of risk",
        "B": "of default",
    }
    with pytest.raises(NotFound):
        opened(platform, {"A": "blob:database"})


def test_removing_a_secret_twice_is_not_found(light_platform: OwnPlatform, tmp_path: Path) -> None:
    light_platform.secrets.set("database", PIN)
    light_platform.secrets.remove("database")

    with pytest.raises((NotFound, Conflict)):
        light_platform.secrets.remove("database")
