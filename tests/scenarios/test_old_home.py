"""A home made before operations were renamed opens, is migrated, and works as before."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import falaj as fj
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.drivers.sql.migrate import HEAD, current_version
from falaj.errors import Denied, FalajError
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowState
from platforms import Clock, OwnPlatform

ARCHIVE = Path(__file__).parents[1] / "data" / "old_home" / "old-home.tar.xz"
OWNER = "amal"


class OldHome:
    """The unpacked home; `facts` were recorded when it was made."""

    def __init__(self, folder: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
            archive.extractall(folder)
        self.path, self.config = folder / "home", folder / "config"
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())

    def open(self) -> OwnPlatform:
        """Open the platform an hour after the home was made: its tokens have not expired."""
        clock = Clock()
        clock.now = datetime.fromisoformat(self.facts["made_at"]) + timedelta(hours=1)
        return OwnPlatform(assemble(open_home(self.path, self.config), as_owner=True, clock=clock), clock)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OldHome:
    monkeypatch.setenv("LOGNAME", OWNER)
    return OldHome(tmp_path)


@pytest.fixture
def platform(home: OldHome) -> Iterator[OwnPlatform]:
    with home.open() as opened:
        yield opened


def error_of(act: Callable[[], Any]) -> type[FalajError] | None:
    try:
        act()
    except FalajError as error:
        return type(error)
    return None


def test_its_database_is_migrated(home: OldHome) -> None:
    engine = sa.create_engine(f"sqlite:///{home.path / 'falaj.db'}")
    before = current_version(engine)

    home.open().close()

    assert (before, current_version(engine)) == ("0013", HEAD)
    engine.dispose()


def test_a_scoped_token_permits_its_scope_only(home: OldHome, platform: OwnPlatform) -> None:
    with acting_as(platform.caller_of(home.facts["scoped"])):
        assert platform.users.whoami().actions == ("blobs.read", "users.whoami")
        assert platform.get("data") == b"some bytes"
        assert error_of(lambda: platform.blobs.list()) is Denied
        assert error_of(lambda: platform.workspaces.create("south")) is Denied


def test_a_token_for_a_whole_group_reaches_that_group_only(home: OldHome, platform: OwnPlatform) -> None:
    with acting_as(platform.caller_of(home.facts["whole"])):
        assert {blob.name for blob in platform.blobs.list().items} == {"plans", "open"}
        assert platform.put("more", b"more").committed
        assert error_of(lambda: platform.objects.show("blob:open")) is Denied


def test_a_custom_policy_allows_and_denies_as_before(home: OldHome, platform: OwnPlatform) -> None:
    with acting_as(platform.caller_of(home.facts["sara"])):
        assert platform.get("risk/open") == b"open to all"
        assert error_of(lambda: platform.get("risk/plans")) is Denied
        assert error_of(lambda: platform.blobs.copy("risk/plans", "second", name="away")) is Denied

    shown = platform.policies.show("risk/reading").text
    assert 'Action::"blobs.read", Action::"blobs.copy"' in shown
    assert 'Action::"objects.label"' in shown


def test_its_data_can_be_read(platform: OwnPlatform) -> None:
    training_set = platform.features.load("churn-train").read_all()

    assert platform.get("data") == b"some bytes"
    assert training_set["facts__spend"].to_pylist() == [1.5, 2.5]
    assert [row.values for row in platform.features.read("facts", keys=("a",)).rows] == [(1.5,)]
    assert platform.models.resolve("churn", alias="champion").number == 1
    assert platform.pipelines.show("weekly").definition.endpoint == "churn"
    assert [each.name for each in platform.secrets.list().items] == ["database"]
    assert platform.queues.show("cards").settings.quota.gpus == 2
    assert [each.terms.workspace for each in platform.queues.budgets()] == ["risk"]
    assert platform.groups.list().items[0].members == ("sara",)


def test_lineage_names_the_operations_of_today(platform: OwnPlatform) -> None:
    names = {node.name for node in platform.lineage.graph("blob:model") if node.kind == "operation"}

    assert names == {"blobs.upload", "models.register", "endpoints.deploy"}


def test_a_call_that_is_repeated_gets_its_first_answer(platform: OwnPlatform) -> None:
    known = platform.workspaces.show("north").id

    with fj.once("create-north"):
        again = platform.workspaces.create("north")

    assert again.id == known


def test_the_audit_log_verifies_from_its_first_entry_and_keeps_the_old_names(
    home: OldHome, platform: OwnPlatform
) -> None:
    platform.users.create("noor")

    verdict = platform.verify_audit()
    old = platform.audit.list(action="user.create").items
    new = platform.audit.list(action="users.create").items

    assert (verdict.ok, verdict.problems) == (True, ())
    assert verdict.entries > home.facts["entries"]
    assert (len(old), len(new)) == (2, 1)
    assert platform.audit.inclusion_proof(old[-1].seq).entry["action"] == "user.create"
    assert platform.audit.consistency_proof(home.facts["entries"]).since == home.facts["entries"]


def test_the_log_states_where_macs_begin_and_older_entries_need_none(
    home: OldHome, platform: OwnPlatform
) -> None:
    entries = platform.entries()
    (stated,) = [entry for entry in entries if "begins" in entry]

    macs = platform.rows_of("SELECT mac FROM governance_audit_entries ORDER BY seq")

    assert stated["action"] == "platform.upgrade"
    assert stated["seq"] >= home.facts["entries"]
    assert [mac is None for mac in macs] == [seq < stated["seq"] for seq in range(len(entries))]
    platform.sql("UPDATE governance_audit_entries SET mac = NULL WHERE seq >= :seq", {"seq": stated["seq"]})
    assert not platform.verify_audit().ok


def test_rows_from_before_are_recorded_at_the_upgrade(platform: OwnPlatform) -> None:
    platform.put("more", b"more")
    before = platform.verify_audit(deep=True)

    platform.sql("DELETE FROM governance_grants WHERE role = 'auditor'")

    assert before.problems == ()
    assert any(
        "of governance_grants was removed" in each for each in platform.verify_audit(deep=True).problems
    )


def test_work_that_was_waiting_is_done(home: OldHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(home.config))

    with fj.open(home.path) as platform:
        *_, last = platform.workflows.watch(home.facts["copy"])

        assert (last.workflow, last.state) == ("blobs.copy", WorkflowState.DONE)
        assert platform.get("copied") == b"some bytes"
