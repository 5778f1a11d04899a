"""Two homes on one PostgreSQL, as two machines have them: no attempt begins while the one before may still run."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.assembly.home import Home, open_home
from falaj.records.training.jobs import Job, JobState
from launcher_testbed import processes_mentioning
from platforms import make_platform
from polling import eventually

pytestmark = pytest.mark.slow

FENCE_S = 10
SHARED = """
isolation = "none"

[keys]
driver = "keyfile"
path = "{folder}/root.json"

[zones.local]
jurisdiction = "AE"
blobs = {{ driver = "files", path = "{folder}/blobs" }}

[jobs]
fence_after = "{fence_s}s"
"""
BEATS = """
import json, os, sys, time
attempt = int(os.environ["FALAJ_ATTEMPT"])
ends_at = time.time() + (float(sys.argv[2]) if attempt == 1 else 1)
while time.time() < ends_at:
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps([attempt, os.getpid(), time.time()]) + "\\n")
    time.sleep(0.1)
"""


class Beat(NamedTuple):
    """A sign of life of an attempt: its number, its process, and when."""

    attempt: int
    pid: int
    at: float


class Machines(NamedTuple):
    """The controllers, the homes of the two machines, and the file to which the job writes that it lives."""

    controllers: ControllerProcesses
    homes: tuple[Home, Home]
    file: Path

    def submit(self, *, lasts_s: float) -> Job:
        """Submit a job, and have the first machine start it."""
        job = self.controllers.submit(BEATS, args=[str(self.file), str(lasts_s)])
        self.controllers.start_controller(self.homes[0])
        eventually(self.beats)
        return job

    def beats(self, attempt: int = 1) -> list[Beat]:
        if not self.file.exists():
            return []
        found = [Beat(*json.loads(line)) for line in self.file.read_text().splitlines()]
        return [beat for beat in found if beat.attempt == attempt]


@pytest.fixture
def machines(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    toml = SHARED.format(folder=tmp_path, fence_s=FENCE_S)
    with (
        make_platform(tmp_path, postgres_url, toml, environment=monkeypatch) as platform,
        run_controllers(platform, tmp_path) as controllers,
    ):
        other = open_home(tmp_path / "other", tmp_path / "other-config")
        other.toml.write_text(platform.home.toml.read_text())
        yield Machines(controllers, (platform.home, other), tmp_path / "beats")


def kill(controller: subprocess.Popen[bytes]) -> None:
    controller.send_signal(signal.SIGKILL)
    controller.wait()


def test_another_machine_begins_the_next_attempt_only_after_the_one_before_has_stopped(
    machines: Machines,
) -> None:
    job = machines.submit(lasts_s=600)
    kill(machines.controllers.running[0])

    machines.controllers.start_controller(machines.homes[1])

    ended = machines.controllers.ends(job)
    assert (ended.state, ended.attempt) == (JobState.DONE, 2)
    assert len({beat.pid for beat in machines.beats(1)}) == 1
    assert machines.beats(1)[-1].at < machines.beats(2)[0].at


def test_the_same_machine_goes_on_with_a_job_when_it_is_back_in_time(machines: Machines) -> None:
    job = machines.submit(lasts_s=2 * FENCE_S)
    kill(machines.controllers.running[0])

    machines.controllers.start_controller(machines.homes[0])

    ended = machines.controllers.ends(job)
    assert (ended.state, ended.attempt) == (JobState.DONE, 1)


def test_a_job_that_nobody_renews_stops_by_itself_and_is_made_again(machines: Machines) -> None:
    job = machines.submit(lasts_s=600)
    kill(machines.controllers.running[0])

    eventually(lambda: not processes_mentioning(str(machines.file)))  # neither its code nor its supervisor

    machines.controllers.start_controller(machines.homes[0])
    ended = machines.controllers.ends(job)
    assert (ended.state, ended.attempt) == (JobState.DONE, 2)
