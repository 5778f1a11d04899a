"""Two controllers on one database: one acts, the other stands by, and no attempt ever runs twice."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.control.controller import LEASE_LOST
from falaj.records.training.jobs import Job, JobState
from falaj.training.tables import attempts
from platforms import make_platform
from polling import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

JOBS = 8
SHORT = """
import time
import falaj as fj
fj.job.log(step=fj.job.attempt, ran=1)
fj.job.flush()
time.sleep(0.3)
"""


@pytest.fixture
def controllers(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ControllerProcesses]:
    with (
        make_platform(tmp_path, postgres_url, environment=monkeypatch) as platform,
        run_controllers(platform, tmp_path) as made,
    ):
        yield made


def ran_once(controllers: ControllerProcesses, jobs: list[Job]) -> None:
    ended = [controllers.ends(job) for job in jobs]
    assert [(job.state, job.attempt) for job in ended] == [(JobState.DONE, 1)] * len(jobs)
    assert [controllers.points(job) for job in jobs] == [{"ran": 1}] * len(jobs)
    assert len(controllers.platform.rows(attempts)) == len(jobs)


def leading(controllers: ControllerProcesses) -> subprocess.Popen[bytes]:
    """Return the controller that holds the lease."""
    (holder,) = controllers.platform.rows_of("SELECT holder FROM control_leases")
    return next(each for each in controllers.running if str(each.pid) == holder.split(":")[1])


def test_a_controller_resumed_after_sigstop_has_lost_its_lease_and_writes_nothing(
    controllers: ControllerProcesses,
) -> None:
    jobs = [controllers.submit(SHORT, name=f"short-{number}") for number in range(JOBS)]
    first = controllers.start_controller()
    eventually(lambda: controllers.fence() == 1)
    second = controllers.start_controller()
    eventually(lambda: any(controllers.state(job) is JobState.RUNNING for job in jobs))

    os.kill(first.pid, signal.SIGSTOP)
    eventually(lambda: controllers.fence() == 2)  # it may hold locks until they time out
    os.kill(first.pid, signal.SIGCONT)

    assert first.wait(PATIENCE_S) == LEASE_LOST
    ran_once(controllers, jobs)
    assert second.poll() is None


def test_controllers_take_over_as_each_active_one_is_killed(controllers: ControllerProcesses) -> None:
    jobs = [controllers.submit(SHORT, name=f"short-{number}") for number in range(JOBS)]
    for _ in range(2):
        controllers.start_controller()
    for turn in (1, 2, 3):
        eventually(lambda turn=turn: controllers.fence() >= turn)  # type: ignore[misc]
        leader = leading(controllers)
        leader.kill()
        leader.wait()
        controllers.start_controller()

    ran_once(controllers, jobs)
