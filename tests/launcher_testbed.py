"""The testbed of the launcher tests: a launcher over one sandbox, and views of the real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.processes.attempt_folder import AttemptFolder, read_json
from falaj.drivers.processes.attempt_spec import AttemptSpec, SandboxSpec
from falaj.drivers.processes.launcher import ProcessLauncher
from falaj.ports.launcher import AttemptState, Launch, Launcher
from polling import eventually

STRONGEST_SANDBOX = pytest.mark.parametrize("testbed", ["bubblewrap"], indirect=True)
"""For tests that do not depend on the sandbox."""

DEADLINE_S = 20
ATTEMPT = "job_1/1"

STARTER = """
import json, sys
from pathlib import Path
from falaj.drivers.processes.launcher import ProcessLauncher
from falaj.drivers.processes.attempt_spec import AttemptSpec
root, spec = Path(sys.argv[1]), AttemptSpec.from_json(json.loads(sys.argv[2]))
launcher = ProcessLauncher(root, sandbox=lambda: spec.sandbox)
print("ready", flush=True)
sys.stdin.readline()
launcher.start(spec.launch)
print("started", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class LauncherTestbed:
    """A folder with attempts, their launcher and their sandbox."""

    root: Path
    sandbox: SandboxSpec

    @property
    def control(self) -> Path:
        return self.root / "control"

    def launcher(self, **options: Any) -> Launcher:
        """A new one each time: nothing is remembered in memory."""
        return ProcessLauncher(self.control, sandbox=lambda: self.sandbox, **options)

    def launch(self, script: str, *arguments: str, attempt: str = ATTEMPT, **options: Any) -> Launch:
        directory = self.root / "attempts" / attempt.replace("/", "-")
        for part in ("code", "inputs", "outputs"):
            (directory / part).mkdir(parents=True)
        (directory / "code" / "script.py").write_text(script)
        given = {"command": [self.sandbox.facts.python, "script.py", *arguments], **options}
        return Launch(attempt=attempt, directory=directory, **given)

    def run(self, script: str, *arguments: str, **options: Any) -> AttemptState:
        launch = self.launch(script, *arguments, **options)
        self.launcher().start(launch)
        return self.end(launch.attempt)

    def end(self, attempt: str = ATTEMPT) -> AttemptState:
        def ended() -> AttemptState | None:
            state = self.launcher().state(attempt)
            return state if state.phase in ("ended", "lost") else None

        state = eventually(ended, within=DEADLINE_S)
        assert state is not None
        return state

    def log(self, attempt: str = ATTEMPT) -> bytes:
        return self.launcher().log(attempt, offset=0, limit=1 << 20)

    def wait_for(self, line: bytes, attempt: str = ATTEMPT) -> None:
        eventually(lambda: line in self.log(attempt), within=DEADLINE_S)

    def supervisors(self) -> list[int]:
        return processes_mentioning(f"{self.control}/")

    def assert_nothing_is_left(self, attempt: str = ATTEMPT) -> None:
        """No process works in our folders, and nothing is left of a forgotten attempt: no folder, no cgroup."""
        eventually(lambda: not working_in(self.root), within=DEADLINE_S)
        made = read_json(AttemptFolder(self.control / attempt.replace("/", "%2F")).cgroup)
        self.launcher().delete(attempt)
        assert not (self.root / "attempts" / attempt.replace("/", "-")).exists()
        assert not (self.control / attempt.replace("/", "%2F")).exists()
        assert made is None or not Path(made["path"]).exists()

    @contextmanager
    def starter(self, launch: Launch) -> Iterator[subprocess.Popen[str]]:
        """Another process that is ready to start `launch`; a line on its stdin lets it do so."""
        spec = json.dumps(AttemptSpec(launch, self.sandbox, 1 << 20).to_json())
        command = [sys.executable, "-c", STARTER, str(self.control), spec]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                process.kill()


def release(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def working_in(folder: Path) -> list[int]:
    """The processes whose working folder lies there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if path.readlink().is_relative_to(folder):
                found.append(int(path.parent.name))
    return found


def processes_mentioning(word: str) -> list[int]:
    """The processes on whose command line `word` stands, seen from outside of all sandboxes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
