"""Attacks that once worked: caches fed from rolled-back changes, lock-outs, foreign homes, lost keys, wrong clocks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.control import lease
from falaj.errors import ConfigInvalid, Conflict, Damaged, FalajError, InvalidInput, KeyUnavailable, NotFound
from falaj.governance.audit.witness import append_line
from falaj.governance.operations.caller import acting_as, once
from falaj.records.governance.identity import Role
from platforms import OwnPlatform, make_platform

LOCK_OUT = 'forbid (principal, action, resource) unless { principal == User::"nobody" };'


@pytest.mark.slow
def test_a_rolled_back_change_leaves_nothing_in_the_cache_of_decisions(platform: OwnPlatform) -> None:
    platform.workspaces.create("team")
    eve = platform.join("eve", Role.ADMIN, workspace="team")
    second = platform.again(as_owner=False)
    with acting_as(eve), pytest.raises(Conflict):
        second.policies.publish("lock", text=LOCK_OUT, workspace="team")

    platform.workspaces.revoke("team", "eve", role=Role.ADMIN)

    with acting_as(eve), pytest.raises(FalajError):
        second.workspaces.grant("team", "eve", role=Role.ADMIN)


@pytest.mark.slow
def test_a_workspaces_policy_does_not_shut_out_the_platforms_administrator(
    light_platform: OwnPlatform,
) -> None:
    light_platform.workspaces.create("team")
    eve = light_platform.join("eve", Role.ADMIN, workspace="team")
    text = f'forbid (principal, action, resource) unless {{ principal == User::"{eve.id}" }};'
    with acting_as(eve):
        light_platform.policies.publish("mine", text=text, workspace="team")

    assert "team" in [found.name for found in light_platform.workspaces.list().items]
    light_platform.policies.withdraw("team/mine")


@pytest.mark.slow
@pytest.mark.parametrize("ident", ["x, role.auditor", "x\\u{1b}[2K", "x\\u{202e}y", "x\\ny", "x" * 200])
def test_a_rule_does_not_pass_for_another_in_the_log(light_platform: OwnPlatform, ident: str) -> None:
    text = f'@id("{ident}") permit (principal, action == Action::"blobs.list", resource);'
    light_platform.policies.publish("mine", text=text)
    with acting_as(light_platform.join("eve")):
        light_platform.blobs.list()

    assert light_platform.entries()[-1]["rule"] == "policy:mine@1#0"


def test_a_revoked_role_gets_no_repeated_answer(light_platform: OwnPlatform) -> None:
    sara = light_platform.join("sara", Role.ADMIN)
    with acting_as(sara), once("grant"):
        light_platform.workspaces.grant("default", "sara", role=Role.VIEWER)

    light_platform.workspaces.revoke("default", "sara", role=Role.ADMIN)

    with acting_as(sara), once("grant"), pytest.raises(FalajError):
        light_platform.workspaces.grant("default", "sara", role=Role.VIEWER)


def test_revoking_a_limited_token_revokes_its_children(light_platform: OwnPlatform) -> None:
    parent = light_platform.tokens.issue(purpose="parent", actions=("tokens.*", "users.*"))
    with acting_as(light_platform.caller_of(parent.secret)):
        child = light_platform.tokens.issue(purpose="child", actions=("users.*",))

    light_platform.tokens.revoke(parent.token.id)

    with pytest.raises(FalajError):
        light_platform.caller_of(child.secret)


def test_a_home_of_another_owner_or_open_to_others_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    toml = home / "falaj.toml"
    toml.write_text("")
    toml.chmod(0o666)

    with pytest.raises(ConfigInvalid, match="chmod go-w"):
        open_home(home, tmp_path / "config")

    if os.geteuid() == 0:
        toml.chmod(0o600)
        os.chown(home, 12345, 12345)
        with pytest.raises(ConfigInvalid, match="owned by user 12345"):
            open_home(home, tmp_path / "config")


def test_a_home_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)

    open_home(home, tmp_path / "config")

    assert home.stat().st_mode & 0o777 == 0o700


def test_a_lost_key_file_is_not_replaced(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        home = platform.home
    home.key_file.rename(tmp_path / "elsewhere")

    with pytest.raises(KeyUnavailable):
        assemble(home)

    assert not home.key_file.exists()


def test_an_emptied_database_is_not_bootstrapped_again(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        home = platform.home
    for file in home.path.glob("falaj.db*"):
        file.unlink()

    with pytest.raises(Damaged, match="knows of an audit log"):
        assemble(home)


def test_a_file_that_is_not_a_database_is_damaged(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")
    home.database.write_bytes(b"this is no database at all, but it is long enough to look" * 100)

    with pytest.raises(Damaged):
        assemble(home)


def test_a_destroyed_key_is_not_left_in_the_files(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        platform.workspaces.create("team")
        wrapped = platform.rows_of("SELECT wrapped FROM governance_data_keys WHERE version = 1")
        platform.keys.destroy("team")

        kept = b"".join(file.read_bytes() for file in platform.home.path.glob("falaj.db*"))
    assert sum(bytes(key) in kept for key in wrapped) == len(wrapped) - 1


def test_a_lease_written_with_a_wrong_clock_is_ignored(light_platform: OwnPlatform) -> None:
    lasts = timedelta(seconds=5)
    future = light_platform.clock() + timedelta(days=1)
    lease.acquire(light_platform.database, "ahead", now=future, lasts=lasts)

    assert lease.acquire(light_platform.database, "right", now=light_platform.clock(), lasts=lasts) == 2


def test_a_reference_of_another_kind_is_unknown(light_platform: OwnPlatform) -> None:
    light_platform.put("a", b"x")

    with pytest.raises(NotFound):
        light_platform.blobs.show("model:a")


def test_a_torn_line_of_the_witness_is_cut_off(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.write_bytes(b'{"whole": 1}\n{"torn')

    with witness.open("r+b") as file:
        append_line(file, '{"next": 2}')

    assert witness.read_text() == '{"whole": 1}\n{"next": 2}\n'


@pytest.mark.parametrize("reference", ["_:x", "default/__:x@1"])
def test_a_kind_of_underscores_alone_is_refused_and_not_an_internal_error(
    light_platform: OwnPlatform, reference: str
) -> None:
    with pytest.raises(InvalidInput):
        light_platform.objects.show(reference)
    with pytest.raises(NotFound):
        light_platform.objects.show(reference.replace("_:", "a_:", 1).replace("_a", "a"))
