"""What-if replays under real controllers: killed, cancelled, watched, and started from the CLI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj as fj
from accounting_history import add_past_jobs, replay_processes
from controller_processes import LEASE_S, ControllerProcesses, run_controllers
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.control.workflows.store import work_row
from falaj.errors import NotFound
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.scheduling.simulation import Changes, NewWeight, WhatIfComparison, WhatIfQuestion
from falaj.scheduling.simulator.history import answer
from platforms import make_platform
from polling import PATIENCE_S, eventually
from processes import is_alive

pytestmark = pytest.mark.slow

JOBS = 1500
"""Seconds that a loaded machine may take."""


@pytest.fixture
def lease_s() -> float:
    return LEASE_S


@pytest.fixture
def controllers(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> Iterator[ControllerProcesses]:
    """Yield a platform with accounting records of the last day."""
    url = "sqlite" if database_url.startswith("sqlite") else database_url
    with (
        make_platform(tmp_path, url, environment=monkeypatch) as platform,
        run_controllers(platform, tmp_path, lease_s=lease_s) as made,
    ):
        platform.queues.set("risk")
        add_past_jobs(platform.database, platform.queues._accounts, JOBS, queues=("risk", "default"))
        yield made


def stopped_replay(controller: subprocess.Popen[bytes]) -> int:
    """Stop the replay process as soon as it exists, and return it."""
    (pid,) = eventually(lambda: replay_processes(controller.pid))
    os.kill(pid, signal.SIGSTOP)
    return pid


def ended(controllers: ControllerProcesses, work: WorkflowRun) -> WorkflowRun:
    eventually(lambda: controllers.platform.workflows.show(work.id).state.ended)
    return controllers.platform.workflows.show(work.id)


def direct(controllers: ControllerProcesses, work: WorkflowRun) -> WhatIfComparison:
    """Return the simulator's result in this process."""
    with controllers.platform.database.read() as tx:
        question = WhatIfQuestion.model_validate(work_row(tx, work.id).input)
    past = controllers.platform.queues.history(
        since=question.since, until=question.until, as_of=question.asked_at
    )
    return answer(question, past)


def test_a_killed_controller_ends_the_replay_and_the_next_one_gets_the_same_result(
    controllers: ControllerProcesses,
) -> None:
    first = controllers.start_controller()
    work = controllers.platform.queues.what_if(changes=Changes(weights=(NewWeight(queue="risk", weight=3),)))
    child = stopped_replay(first)

    first.kill()
    first.wait()
    os.kill(child, signal.SIGCONT)
    eventually(lambda: not is_alive(child))
    assert controllers.platform.workflows.show(work.id).state is WorkflowState.RUNNING
    with pytest.raises(NotFound):
        controllers.platform.queues.what_if_result(work.id)
    controllers.start_controller()

    done = ended(controllers, work)
    assert (done.state, done.error) == (WorkflowState.DONE, None)
    assert done.result == {"work": work.id, "jobs": JOBS}
    assert controllers.platform.queues.what_if_result(work.id) == direct(controllers, work)


def test_cancelling_ends_the_replay_and_its_process(controllers: ControllerProcesses) -> None:
    controller = controllers.start_controller()
    work = controllers.platform.queues.what_if()
    child = stopped_replay(controller)

    controllers.platform.workflows.cancel(work.id)

    done = ended(controllers, work)
    assert done.state is WorkflowState.CANCELLED
    assert not is_alive(child)
    with pytest.raises(NotFound):
        controllers.platform.queues.what_if_result(work.id)
    again = controllers.platform.queues.what_if()
    assert ended(controllers, again).state is WorkflowState.DONE  # the controller continues


def test_a_stopping_controller_ends_the_replay_and_the_next_one_repeats_it(
    controllers: ControllerProcesses,
) -> None:
    first = controllers.start_controller()
    work = controllers.platform.queues.what_if()
    child = stopped_replay(first)

    first.send_signal(signal.SIGTERM)
    first.wait(PATIENCE_S)

    assert not is_alive(child)
    assert controllers.platform.workflows.show(work.id).state is WorkflowState.RUNNING
    controllers.start_controller()
    assert ended(controllers, work).state is WorkflowState.DONE


@pytest.mark.parametrize("lease_s", [2.0])  # shorter than the replay
def test_progress_can_be_watched_while_the_lease_is_kept(
    controllers: ControllerProcesses,
) -> None:
    controller = controllers.start_controller()
    work = controllers.platform.queues.what_if()

    seen = list(controllers.platform.workflows.watch(work.id))

    assert seen[-1].state is WorkflowState.DONE
    counted = [each.step for each in seen if each.steps == 2 * JOBS]
    assert any(0 < step < 2 * JOBS for step in counted)
    assert counted == sorted(counted)
    assert counted[-1] == 2 * JOBS
    assert controllers.fence() == 1
    assert controller.poll() is None


# --------------------------------------------------------------------------------------- on the command line


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home with accounting records of the last hours."""
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("FALAJ_URL", "FALAJ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    platform = assemble(open_home(), as_owner=True)
    platform.services.queues.set("risk")
    add_past_jobs(platform.database, platform.services.queues._accounts, 30, queues=("risk",))
    platform.close()
    return tmp_path / "home"


def falaj(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "falaj", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_the_command_waits_and_prints_the_table_beside_a_running_platform(home: Path) -> None:
    up = subprocess.Popen(
        [sys.executable, "-m", "falaj", "up", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        eventually(lambda: "ready" in falaj("status").stdout)

        ran = falaj("queues", "what-if", "--weight", "risk=2")
        later = falaj("queues", "what-if", "--detach", "--json")
        ident = WorkflowRun.model_validate_json(later.stdout).id
        with fj.connect(str(open_home().platform()["url"])) as platform:
            *_, done = platform.workflows.watch(ident)
        shown = falaj("queues", "what-if-result", ident)
        as_json = falaj("queues", "what-if-result", ident, "--json")
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=PATIENCE_S)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "30 jobs, submitted" in ran.stdout
    assert "weight of risk: 1 → 2" in ran.stdout
    assert done.state is WorkflowState.DONE
    assert "nothing is changed" in shown.stdout
    assert WhatIfComparison.model_validate_json(as_json.stdout).jobs == 30


def test_the_command_works_without_a_running_platform(home: Path) -> None:
    ran = falaj("queues", "what-if", "--json")
    later = falaj("queues", "what-if", "--detach")
    ident = later.stdout.partition(" ")[0]
    watched = falaj("workflows", "watch", ident)
    shown = falaj("queues", "what-if-result", ident)

    assert WhatIfComparison.model_validate_json(ran.stdout).jobs == 30
    assert f"falaj queues what-if-result {ident}" in later.stdout
    assert watched.returncode == 0
    assert "queues.what_if done" in watched.stdout
    assert "30 jobs, submitted" in shown.stdout


def test_an_unfinished_replay_continues_when_the_home_is_opened_again(home: Path) -> None:
    with fj.open(home) as platform:
        work = platform.queues.what_if()
    with fj.open(home) as platform:
        *_, done = platform.workflows.watch(work.id)
        found = platform.queues.what_if_result(work.id)

    assert (done.state, found.jobs) == (WorkflowState.DONE, 30)
