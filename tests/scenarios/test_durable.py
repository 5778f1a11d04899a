"""Durable workflows: controllers are killed in the middle, and no operation takes effect twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import insert

from falaj.control import lease
from falaj.control.controller import LEASE_LOST
from falaj.control.tables import work
from falaj.errors import Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.operations.caller import on_terms
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, PrincipalId, new_id
from platforms import URL_VARIABLE, OwnPlatform, make_platform
from polling import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

NAMES = ["first", "second", "third", "fourth"]
SCRIPT = Path(__file__).with_name("paused_controller.py")


@dataclass
class Stage:
    """A platform, its controllers, and the files by which the test communicates with them."""

    platform: OwnPlatform
    signs: Path
    database_url: str
    lease_s: float = 1.0
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_controller(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "FALAJ_HOME": str(self.platform.home.path),
            "FALAJ_CONFIG_DIR": str(self.platform.home.config_dir),
            "FALAJ_TEST_SIGNS": str(self.signs),
            "FALAJ_TEST_LEASE": str(self.lease_s),
            URL_VARIABLE: self.database_url,
        }
        process = subprocess.Popen([sys.executable, SCRIPT], env=environment, stdin=subprocess.PIPE)
        self.running.append(process)
        return process

    def start_workflow(self, names: list[str]) -> str:
        """Start a workflow that creates workspaces, on behalf of the owner."""
        owner = self.platform.users.whoami().principal
        ident, now = new_id("work"), self.platform.clock()
        row = {
            "id": ident,
            "workflow": "make",
            "input": {"names": names},
            "behalf": owner.id,
            "state": WorkflowState.WAITING,
            "step": 0,
            "cancelling": False,
        }
        with self.platform.database.write() as tx:
            home = objects.by_name(tx, workspace=ROOT, kind="workspace", name="default")
            assert home is not None
            new = StoredObject(
                id=ident,
                workspace=home.id,
                kind="work",
                name=ident,
                owner=PrincipalId(owner.id),
                created_at=now,
            )
            objects.create(tx, new)
            tx.execute(insert(work), row)
        return ident

    def hold(self, name: str) -> Path:
        sign = self.signs / f"hold-{name}"
        sign.touch()
        return sign

    def did(self, name: str, by: subprocess.Popen[bytes]) -> None:
        eventually((self.signs / f"did-{name}-{by.pid}").exists)

    def ends(self, ident: str) -> WorkflowRun:
        eventually(lambda: self.platform.workflows.show(ident).state.ended)
        return self.platform.workflows.show(ident)

    def outcomes(self) -> list[tuple[str, str]]:
        """Return the rule and outcome of every workspaces.create in the audit log."""
        entries = [entry for entry in self.platform.entries() if entry["action"] == "workspaces.create"]
        return [(entry["rule"], entry["outcome"]) for entry in entries]


@pytest.fixture
def stage(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    signs = tmp_path / "signs"
    signs.mkdir()
    with made(tmp_path, database_url, monkeypatch) as platform:
        staged = Stage(platform, signs, database_url)
        yield staged
        for process in staged.running:
            process.kill()
            process.communicate()


@contextmanager
def made(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnPlatform]:
    url = "sqlite" if database_url.startswith("sqlite") else database_url
    with make_platform(tmp_path, url, environment=monkeypatch) as platform:
        yield platform


def test_a_workflow_killed_in_the_middle_finishes_after_a_restart(stage: Stage) -> None:
    hold = stage.hold("second")
    killed = stage.start_controller()
    ident = stage.start_workflow(NAMES)
    stage.did("second", killed)

    killed.kill()
    killed.wait()
    hold.unlink()
    stage.start_controller()

    ended = stage.ends(ident)
    assert (ended.state, ended.result) == (WorkflowState.DONE, {"made": NAMES})
    assert stage.outcomes().count(("replayed", "done")) == 1
    assert len([rule for rule, _ in stage.outcomes() if rule != "replayed"]) == len(NAMES)


def test_a_standby_takes_over_when_the_active_controller_dies(stage: Stage) -> None:
    hold = stage.hold("third")
    active = stage.start_controller()
    ident = stage.start_workflow(NAMES)
    stage.did("third", active)
    standby = stage.start_controller()

    active.kill()
    hold.unlink()

    assert stage.ends(ident).state is WorkflowState.DONE
    assert standby.poll() is None
    with stage.platform.database.read() as tx:
        assert lease.current_fence(tx) == 2
    assert len([rule for rule, _ in stage.outcomes() if rule != "replayed"]) == len(NAMES)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_controller_whose_lease_expired_has_no_effect(stage: Stage) -> None:
    """On PostgreSQL only: a stopped process may hold SQLite's only lock."""
    hold = stage.hold("second")
    sleeper = stage.start_controller()
    ident = stage.start_workflow(NAMES)
    stage.did("second", sleeper)

    stop_without_locks(sleeper, stage)
    hold.unlink()
    stage.start_controller()
    ended = stage.ends(ident)
    sleeper.send_signal(signal.SIGCONT)

    assert ended.state is WorkflowState.DONE
    assert sleeper.wait(PATIENCE_S) == LEASE_LOST
    assert stage.platform.workflows.show(ident) == ended
    assert len([rule for rule, _ in stage.outcomes() if rule != "replayed"]) == len(NAMES)


def stop_without_locks(sleeper: subprocess.Popen[bytes], stage: Stage) -> None:
    """Stop it at a moment when it is not renewing its lease."""

    def stopped() -> bool:
        sleeper.send_signal(signal.SIGSTOP)
        try:
            with stage.platform.database.write() as tx:
                tx.execute_sql("SELECT fence FROM control_leases FOR UPDATE NOWAIT")
                tx.execute_sql("SELECT size FROM governance_audit_state FOR UPDATE NOWAIT")
        except Unavailable:
            sleeper.send_signal(signal.SIGCONT)
            return False
        return True

    eventually(stopped)


def test_work_is_authorized_again_at_each_step(stage: Stage) -> None:
    hold = stage.hold("first")
    controller = stage.start_controller()
    stage.platform.users.create("second-admin")
    stage.platform.workspaces.grant("platform", "second-admin", role="admin")
    ident = stage.start_workflow(NAMES)
    stage.did("first", controller)

    owner = stage.platform.users.whoami().principal.name
    stage.platform.workspaces.revoke("platform", owner, role="admin")
    hold.unlink()

    ended = eventually(lambda: ended_row(stage, ident))
    assert ended["state"] == WorkflowState.FAILED
    assert "may not workspaces.create" in ended["error"]
    assert [outcome for _, outcome in stage.outcomes()] == ["done", "denied"]


def ended_row(stage: Stage, ident: str) -> dict[str, object] | None:
    row = next(row for row in stage.platform.rows(work) if row["id"] == ident)
    return row if WorkflowState(row["state"]).ended else None


def test_cancelled_work_stops_before_its_next_step(stage: Stage) -> None:
    hold = stage.hold("second")
    controller = stage.start_controller()
    ident = stage.start_workflow(NAMES)
    stage.did("second", controller)

    stage.platform.workflows.cancel(ident)
    hold.unlink()

    ended = stage.ends(ident)
    assert ended.state is WorkflowState.CANCELLED
    assert len(stage.outcomes()) == 2


def test_an_operation_from_a_controller_without_the_lease_is_refused(stage: Stage) -> None:
    now, lasts = stage.platform.clock(), stage.platform.clock.now.resolution * 10**6
    fence = lease.acquire(stage.platform.database, "one", now=now, lasts=lasts)
    assert fence is not None
    lease.release(stage.platform.database, fence, now=now)
    stage.platform.clock.advance(2 * lasts)
    assert lease.acquire(stage.platform.database, "two", now=stage.platform.clock(), lasts=lasts)

    with on_terms(key="work:step", fence=fence), pytest.raises(Fenced):
        stage.platform.workspaces.create("late")

    assert "late" not in [found.name for found in stage.platform.workspaces.list().items]
