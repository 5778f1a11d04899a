"""A home of 0.1.0 opens, is migrated, and works as before."""

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

ARCHIVE = Path(__file__).parents[1] / "data" / "old_home" / "home-0.1.0.tar.xz"
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

    assert (before, current_version(engine)) == ("0001", HEAD)
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


def test_a_custom_policy_allows_and_denies(home: OldHome, platform: OwnPlatform) -> None:
    with acting_as(platform.caller_of(home.facts["sara"])):
        assert platform.get("risk/open") == b"open to all"
        assert error_of(lambda: platform.get("risk/plans")) is Denied
        assert error_of(lambda: platform.blobs.copy("risk/plans", "second", name="away")) is Denied


def test_settings_are_kept(platform: OwnPlatform) -> None:
    assert platform.pipelines.show("weekly").definition.endpoint == "churn"
    assert [each.name for each in platform.secrets.list().items] == ["database"]
    assert platform.queues.show("cards").settings.quota.gpus == 2
    assert [each.terms.workspace for each in platform.queues.budgets()] == ["risk"]
    assert platform.groups.list().items[0].members == ("sara",)
    assert platform.webhooks.show("deploys").types == ("endpoints.*",)


def test_features_are_read_and_added_to(platform: OwnPlatform) -> None:
    training_set = platform.features.load("churn-train").read_all()

    assert training_set["facts__spend"].to_pylist()[:2] == [1.5, 2.5]
    assert platform.features.scan("facts").read_all().num_rows == 40
    assert [row.values for row in platform.features.read("facts", keys=("a", "new")).rows] == [
        (1.5,),
        (None,),
    ]
    assert platform.features.materialize("facts").table_version == 0


def test_runs_are_read(home: OldHome, platform: OwnPlatform) -> None:
    run = home.facts["run"]
    found = platform.runs.show(run)

    assert ([(each.key, each.value) for each in found.params], found.run.name) == ([("lr", "0.1")], "first")
    assert platform.runs.metrics(run, "loss").read_all()["value"].to_pylist() == [1.0, 0.5, 1 / 3]
    assert [each.path for each in platform.runs.artifacts(run).items] == ["losses.csv"]


def test_a_job_keeps_its_log_and_its_outputs(home: OldHome, platform: OwnPlatform) -> None:
    job = platform.jobs.show(home.facts["job"])

    assert (job.state, [each.path for each in job.outputs]) == ("done", ["result.txt"])
    assert b"hello from the job" in b"".join(platform.jobs.logs(job.id))


def test_models_verify_and_are_promoted(platform: OwnPlatform) -> None:
    *_, check = platform.models.verify("churn@2")

    assert (check.ok, check.problems) == (True, ())
    assert platform.models.resolve("churn", alias="champion").number == 2
    assert [each.number for each in platform.models.versions("churn").items] == [2, 1]
    assert platform.models.promote("churn@1", to="champion").change.evidence is not None
    assert [each.version for each in platform.endpoints.show("churn").routes] == ["1"]


def test_a_monitor_has_its_reference_and_its_windows(platform: OwnPlatform) -> None:
    found = platform.monitoring.distribution("spending", "facts__spend", bins=4)

    assert (sum(found.before), sum(found.now)) == (40, 40)


def test_lineage_names_the_operations(platform: OwnPlatform) -> None:
    names = {node.name for node in platform.lineage.graph("blob:model") if node.kind == "operation"}

    assert names == {"blobs.upload", "models.register", "endpoints.deploy", "monitoring.watch"}


def test_a_call_that_is_repeated_gets_its_first_answer(platform: OwnPlatform) -> None:
    known = platform.workspaces.show("north").id

    with fj.once("create-north"):
        again = platform.workspaces.create("north")

    assert again.id == known


def test_the_audit_log_verifies_from_its_first_entry(home: OldHome, platform: OwnPlatform) -> None:
    platform.users.create("noor")
    before = platform.verify_audit(deep=True)

    platform.audit.accept(reason="the home was moved")

    assert all(
        "witness" in problem for problem in before.problems
    )  # it lies elsewhere than where the home was made
    verdict = platform.verify_audit(deep=True)
    assert (verdict.ok, verdict.problems) == (True, ())
    assert verdict.entries > home.facts["entries"]
    first = platform.audit.list(action="users.create").items[-1]
    assert platform.audit.inclusion_proof(first.seq).entry["action"] == "users.create"
    assert platform.audit.consistency_proof(home.facts["entries"]).since == home.facts["entries"]


def test_work_that_was_waiting_is_done(home: OldHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(home.config))

    with fj.open(home.path) as platform:
        *_, last = platform.workflows.watch(home.facts["copy"])

        assert (last.workflow, last.state) == ("blobs.copy", WorkflowState.DONE)
        assert platform.get("copied") == b"some bytes"
