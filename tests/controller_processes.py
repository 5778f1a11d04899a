"""A platform with controllers as real processes, for scenarios that kill, stop and start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from falaj.assembly.home import Home
from falaj.records.training.jobs import Job, JobState
from platforms import OwnPlatform
from polling import eventually

CONTROLLER = """
import sys
from datetime import timedelta
from falaj.apps.controller.process import main
from falaj.control.controller import ControllerTiming
main(timing=ControllerTiming(lease=timedelta(seconds=float(sys.argv[1])), every_s=0.03))
"""
LEASE_S = 5.0
"""On a busy machine a process may get no CPU for a second, and one that loses its lease ends for good here.

The lease of a killed controller is taken at once; that of a stopped one only when it expires.
"""


@dataclass
class ControllerProcesses:
    """A platform, and the controllers that run on it."""

    platform: OwnPlatform
    folder: Path
    lease_s: float = LEASE_S
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_controller(self, home: Home | None = None) -> subprocess.Popen[bytes]:
        """Start one, on the platform's own home or on that of another machine."""
        home = home or self.platform.home
        places = {"FALAJ_HOME": str(home.path), "FALAJ_CONFIG_DIR": str(home.config_dir)}
        process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(self.lease_s)],
            env=os.environ | places,
            stdin=subprocess.PIPE,
        )
        self.running.append(process)
        return process

    def submit(self, script: str, **options: object) -> Job:
        folder = self.folder / "code"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(textwrap.dedent(script))
        return self.platform.train(folder / "train.py", **options)

    def state(self, job: Job) -> JobState:
        return self.platform.jobs.show(job.id).state

    def ends(self, job: Job) -> Job:
        eventually(lambda: self.state(job).ended)
        return self.platform.jobs.show(job.id)

    def fence(self) -> int:
        found: list[int] = self.platform.rows_of("SELECT fence FROM control_leases")
        return found[0] if found else 0

    def is_led_by_the_newest(self) -> bool:
        """Return whether the controller that was started last holds the lease."""
        return self.fence() == len(self.running)

    def points(self, job: Job) -> dict[str, int]:
        return {each.key: each.points for each in self.platform.runs.show(job.run).metrics}

    def losses(self, job: Job) -> dict[int, set[float]]:
        """Return every loss that was logged for a step."""
        history = self.platform.runs.metrics(job.run, "loss").read_all().to_pydict()
        by_step: dict[int, set[float]] = {}
        for step, value in zip(history["step"], history["value"], strict=True):
            by_step.setdefault(step, set()).add(value)
        return by_step

    def log(self, job: Job) -> str:
        return b"".join(self.platform.jobs.logs(job.id)).decode()


@contextmanager
def run_controllers(
    platform: OwnPlatform, folder: Path, *, lease_s: float = LEASE_S
) -> Iterator[ControllerProcesses]:
    """Yield a platform, and stop its controllers at the end."""
    controllers = ControllerProcesses(platform, folder, lease_s)
    try:
        yield controllers
    finally:
        for process in controllers.running:
            for number in (signal.SIGCONT, signal.SIGTERM):
                process.send_signal(number)
            process.communicate()
