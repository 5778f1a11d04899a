"""Only what Falaj wrote is signed, and what binds the log cannot go missing unnoticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import delete, insert

from falaj.assembly.doctor.findings import DoctorContext
from falaj.assembly.doctor.state import check_audit
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.errors import FalajError, Tampered
from falaj.governance.audit.merkle import Frontier
from falaj.governance.audit.verify import canonical, leaf_hash
from falaj.governance.audit.witness import Witness
from falaj.governance.operations.caller import acting_as
from falaj.governance.tables import audit_entries, audit_heads, audit_state
from falaj.records.doctor import Finding
from falaj.records.governance.identity import Role
from platforms import OwnPlatform, make_platform

if TYPE_CHECKING:
    from conftest import Token

LOG_TABLES = (audit_entries, audit_heads, audit_state)


@pytest.fixture
def signed(platform: OwnPlatform) -> OwnPlatform:
    """A platform with a few entries, all signed."""
    for number in range(3):
        platform.workspaces.create(f"team-{number}")
        platform.parts.audit.sign_head()
    return platform


def forge(platform: OwnPlatform, mac: bytes = bytes(32), **changes: Any) -> int:
    """Append an entry as who has the database can: with its leaf hash, and size and tree that fit; its number."""
    entries = platform.entries()
    seq = len(entries)
    entry = {**entries[-1], "seq": seq, "caller": "nobody", **changes}
    data = canonical(entry)
    row = {name: entry[name] for name in ("seq", "caller", "action", "outcome", "workspace")}
    with platform.database.write() as tx:
        row |= {"at": platform.clock.now, "leaf": leaf_hash(data), "entry": data.decode(), "mac": mac}
        tx.execute(insert(audit_entries), row)
    fix_state(platform)
    return seq


def fix_state(platform: OwnPlatform) -> None:
    leaves = [bytes(row["leaf"]) for row in sorted(platform.rows(audit_entries), key=lambda row: row["seq"])]
    change = {"size": len(leaves), "frontier": Frontier().extend(leaves).to_text()}
    platform.sql("UPDATE governance_audit_state SET size = :size, frontier = :frontier", change)


def edit_unsigned(platform: OwnPlatform) -> int:
    """Alter an entry that no head covers yet, with its leaf hash, size and tree; its number."""
    platform.workspaces.create("unsigned")
    entry = {**platform.entries()[-1], "caller": "nobody"}
    data = canonical(entry)
    change = {"seq": entry["seq"], "leaf": leaf_hash(data), "entry": data.decode()}
    platform.sql("UPDATE governance_audit_entries SET leaf = :leaf, entry = :entry WHERE seq = :seq", change)
    fix_state(platform)
    return int(entry["seq"])


def forge_with_the_mac_of_another(platform: OwnPlatform) -> int:
    return forge(platform, mac=bytes(platform.rows(audit_entries)[-1]["mac"]))


FORGERIES: list[Callable[[OwnPlatform], int]] = [
    forge,
    edit_unsigned,
    forge_with_the_mac_of_another,
]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: str(forgery.__name__))
def test_a_forged_entry_is_not_signed_and_is_named(
    signed: OwnPlatform, forgery: Callable[[OwnPlatform], int]
) -> None:
    seq = forgery(signed)
    heads = signed.count(audit_heads)

    for platform in (signed, signed.again()):  # this process, and one that starts afterwards
        with pytest.raises(Tampered, match=f"entry {seq} was not written by Falaj"):
            platform.parts.audit.sign_head()
        check = platform.verify_audit()
        assert not check.ok
        assert any(problem.startswith(f"Entry {seq} was not written by Falaj") for problem in check.problems)
    assert signed.count(audit_heads) == heads


def test_the_entries_around_a_forged_one_are_not_accused(signed: OwnPlatform) -> None:
    signed.workspaces.create("before")
    seq = forge(signed)
    signed.workspaces.create("after")

    with pytest.raises(Tampered) as refusal:
        signed.parts.audit.sign_head()

    assert refusal.value.details == {"entries": [seq]}


def test_signing_goes_on_after_root_keys_were_rotated(signed: OwnPlatform) -> None:
    signed.keys.rotate()
    signed.workspaces.create("after")

    assert signed.again().verify_audit().problems == ()


def test_damage_that_was_accepted_is_named_by_every_verification(signed: OwnPlatform) -> None:
    seq = forge(signed)

    accepted = signed.audit.accept(reason="an intern, 3 May")

    assert accepted.entries == (seq,)
    check = signed.again().verify_audit()
    assert (check.ok, check.problems) == (True, ())
    (note,) = check.notes
    assert f"entry {seq} was not written by Falaj" in note
    assert "an intern, 3 May" in note
    forge(signed)
    assert not signed.verify_audit().ok


def test_an_acceptance_cannot_be_forged(signed: OwnPlatform) -> None:
    seq = forge(signed)
    forge(signed, action="audit.accept", accepted={"entries": [seq, seq + 1], "problems": [], "reason": "-"})

    with pytest.raises(Tampered):
        signed.parts.audit.sign_head()


# --------------------------------------------------------------------------------------- the witness


def remove(platform: OwnPlatform) -> None:
    platform.home.witness.unlink()


def empty(platform: OwnPlatform) -> None:
    platform.home.witness.write_bytes(b"")


def cut(platform: OwnPlatform) -> None:
    lines = platform.home.witness.read_bytes().splitlines(keepends=True)
    platform.home.witness.write_bytes(b"".join(lines[:-1]))


def replace_a_line(platform: OwnPlatform) -> None:
    lines = platform.home.witness.read_bytes().splitlines(keepends=True)
    platform.home.witness.write_bytes(b"".join([lines[1], *lines[1:]]))


def remove_with_the_memory(platform: OwnPlatform) -> None:
    remove(platform)
    forget(platform)


def forget(platform: OwnPlatform) -> None:
    """Remove what the key's store remembers."""
    for file in platform.home.key_file.parent.iterdir():
        if file != platform.home.key_file:
            file.unlink()


def garble_the_memory(platform: OwnPlatform) -> None:
    for file in platform.home.key_file.parent.iterdir():
        if file != platform.home.key_file:
            file.write_bytes(b"{}")


@pytest.mark.parametrize(
    "loss",
    [remove, empty, cut, replace_a_line, remove_with_the_memory, forget, garble_the_memory],
    ids=lambda loss: loss.__name__,
)
def test_a_witness_that_is_gone_is_noticed_for_good(
    signed: OwnPlatform, loss: Callable[[OwnPlatform], None]
) -> None:
    loss(signed)

    for platform in (signed, signed.again()):
        for number in range(3):
            platform.workspaces.create(f"later-{number}-{id(platform)}")
            try:
                platform.parts.audit.sign_head()
            except Tampered as error:
                assert "audit log" in error.message  # noqa: PT017 - not every loss is seen here
        check = platform.verify_audit()
        assert not check.ok
        assert any("falaj audit accept" in problem for problem in check.problems)


def test_a_lost_witness_can_be_accepted(signed: OwnPlatform) -> None:
    remove(signed)

    signed.audit.accept(reason="the disk broke")

    check = signed.again().verify_audit()
    assert (check.ok, check.problems) == (True, ())
    assert "is gone" in check.notes[0]
    assert signed.home.witness.read_text()
    remove(signed)
    assert not signed.verify_audit().ok


def test_a_witness_that_moves_is_stated_in_the_log_and_the_old_one_still_counts(
    signed: OwnPlatform, tmp_path: Path
) -> None:
    audit = signed.parts.config.audit.model_copy(update={"witness": tmp_path / "elsewhere.jsonl"})
    config = signed.parts.config.model_copy(update={"audit": audit})
    moved = OwnPlatform(assemble(signed.home, config=config, as_owner=True, clock=signed.clock), signed.clock)

    with moved:
        assert moved.entries()[-1]["witness"]["path"] == str(tmp_path / "elsewhere.jsonl")
        assert moved.verify_audit().problems == ()
        remove(signed)
        assert not moved.verify_audit().ok


def test_a_second_home_on_one_database_has_a_witness_of_its_own(signed: OwnPlatform, tmp_path: Path) -> None:
    home = open_home(tmp_path / "second" / "home", tmp_path / "second" / "config")
    shutil.copy(signed.home.key_file, home.key_file)
    if signed.home.database.exists():
        (home.path / "falaj.db").symlink_to(signed.home.database)
    for shared in ("blobs", "tables", "online"):
        (home.path / shared).symlink_to(signed.home.path / shared)
    with OwnPlatform(
        assemble(home, config=signed.parts.config, as_owner=True, clock=signed.clock), signed.clock
    ) as second:
        second.workspaces.create("by-the-second")
        signed.workspaces.create("by-the-first")

        assert signed.verify_audit().problems == ()
        assert second.verify_audit().problems == ()
        home.witness.unlink()
        assert not second.verify_audit().ok
        assert signed.verify_audit().ok


# ------------------------------------------------------------------- a database that was rolled back


def roll_back(platform: OwnPlatform, change: Callable[[], Any]) -> None:
    """Make a change, and put the log back as it was before: a database of yesterday."""
    kept = [platform.rows(table) for table in LOG_TABLES]
    change()
    platform.parts.audit.sign_head()
    with platform.database.write() as tx:
        for table, rows in zip(LOG_TABLES, kept, strict=True):
            tx.execute(delete(table))
            tx.execute(insert(table), rows)


def test_a_rolled_back_database_is_noticed_without_a_witness(signed: OwnPlatform) -> None:
    roll_back(signed, lambda: signed.workspaces.create("undone"))
    again = signed.again()

    problems = again.parts.audit.unbound()

    assert "rolled back" in problems[0]
    with pytest.raises(Tampered, match="rolled back"):
        again.parts.audit.sign_head()
    for number in range(5):  # it grows beyond the size that was signed
        again.workspaces.create(f"instead-{number}")
    with pytest.raises(Tampered, match="are not those that were signed"):
        again.parts.audit.sign_head()
    assert not again.verify_audit().ok


def test_a_restored_database_can_be_accepted(signed: OwnPlatform) -> None:
    roll_back(signed, lambda: signed.workspaces.create("undone"))
    again = signed.again()

    again.audit.accept(reason="restored from last night's backup")

    check = again.verify_audit()
    assert (check.ok, check.problems) == (True, ())
    assert "rolled back" in check.notes[0]
    assert list(signed.home.witness.parent.glob("*.until-*"))


def test_a_denied_or_failed_acceptance_does_not_stop_the_signing(signed: OwnPlatform) -> None:
    """Such an entry accepts nothing; reading it as if it did once ended all signing, for any caller."""
    with acting_as(signed.join("stranger", Role.VIEWER)), pytest.raises(FalajError):
        signed.audit.accept(reason="let me in")
    with pytest.raises(FalajError):
        signed.audit.accept(reason="")

    assert signed.parts.audit.sign_head() is not None
    assert signed.verify_audit().problems == ()


def test_a_token_keeps_the_newest_head_too(
    tmp_path: Path, softhsm: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_TEST_PIN", softhsm.pin)
    place = f'module = "{softhsm.module}"\ntoken = "{softhsm.label}"\npin = "env:FALAJ_TEST_PIN"'
    keys = f'[keys]\ndriver = "pkcs11"\n{place}'
    with make_platform(tmp_path, toml=keys) as platform:
        platform.workspaces.create("team-a")
        platform.parts.audit.sign_head()
        roll_back(platform, lambda: platform.workspaces.create("undone"))

    with OwnPlatform(assemble(platform.home, as_owner=True, clock=platform.clock), platform.clock) as again:
        assert "rolled back" in again.parts.audit.unbound()[0]
        again.audit.accept(reason="restored")
        assert again.verify_audit().problems == ()
        seq = forge(again)
        with pytest.raises(Tampered, match=f"entry {seq} "):
            again.parts.audit.sign_head()


def test_the_witness_takes_heads_from_several_processes(tmp_path: Path, signed: OwnPlatform) -> None:
    witness: Witness = signed.parts.audit.witness
    before = len(signed.home.witness.read_text().splitlines())
    others = [signed.again() for _ in range(2)]

    for turn in range(6):
        platform = (signed, *others)[turn % 3]
        platform.workspaces.create(f"turn-{turn}")
        platform.parts.audit.sign_head()

    assert len(signed.home.witness.read_text().splitlines()) == before + 6
    assert witness.problems(signed.home.witness) == []


# ------------------------------------------------------------------------------------------ the doctor


def test_the_doctor_names_forged_entries_and_a_lost_witness(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(light_platform.home.config_dir))
    light_platform.parts.audit.sign_head()
    before = about_audit(light_platform)

    seq = forge(light_platform)
    remove(light_platform)

    assert [finding.status for finding in before] == ["ok"]
    after = about_audit(light_platform)
    assert {finding.status for finding in after} == {"fail"}
    words = " ".join(finding.words for finding in after)
    assert f"entry {seq} was not written by Falaj" in words
    assert "is gone" in words


def about_audit(platform: OwnPlatform) -> list[Finding]:
    context = DoctorContext(platform.home, platform.parts.config)
    return list(check_audit(context))
