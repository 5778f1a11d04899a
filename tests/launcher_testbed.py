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
        """Return a new launcher, which has nothing in memory."""
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
        launcher = self.launcher()

        def ended() -> AttemptState | None:
            state = launcher.state(attempt)
            return state if state.phase in ("ended", "lost") else None

        state = eventually(ended)
        assert state is not None
        return state

    def log(self, attempt: str = ATTEMPT) -> bytes:
        return self.launcher().log(attempt, offset=0, limit=1 << 20)

    def wait_for(self, line: bytes, attempt: str = ATTEMPT) -> None:
        eventually(lambda: line in self.log(attempt))

    def log_file(self, attempt: str = ATTEMPT) -> Path:
        """Return the file in which the launcher keeps the log."""
        return self.control / attempt.replace("/", "%2F") / "log"

    def code_folder(self, attempt: str = ATTEMPT) -> Path:
        """Return the working directory of the code, as it sees it itself."""
        return self.root / "attempts" / attempt.replace("/", "-") / "code"

    def tell(self, name: str, attempt: str = ATTEMPT) -> None:
        """Create a file in the working directory of the code while it runs."""
        (self.code_folder(attempt) / name).touch()

    def assert_ended(self, word: str) -> None:
        """Check that no process with `word` in its command line is left where `delete` has returned."""
        assert not processes_mentioning(word)

    def supervisors(self) -> list[int]:
        return processes_mentioning(f"{self.control}/")

    def assert_nothing_is_left(self, attempt: str = ATTEMPT) -> None:
        """Check that no process works in the folders, and that a forgotten attempt left no folder and no cgroup."""
        eventually(lambda: not working_in(self.root))
        made = read_json(AttemptFolder(self.control / attempt.replace("/", "%2F")).cgroup)
        self.launcher().delete(attempt)
        assert not (self.root / "attempts" / attempt.replace("/", "-")).exists()
        assert not (self.control / attempt.replace("/", "%2F")).exists()
        assert made is None or not Path(made["path"]).exists()

    @contextmanager
    def starter(self, launch: Launch) -> Iterator[subprocess.Popen[str]]:
        """Start another process that is ready to start `launch`; a line on its stdin lets it do so."""
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
    """Return the processes whose working directory is below `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if path.readlink().is_relative_to(folder):
                found.append(int(path.parent.name))
    return found


def processes_mentioning(word: str) -> list[int]:
    """Return the processes with `word` in their command line, seen from outside all sandboxes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
