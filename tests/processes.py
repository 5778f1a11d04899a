"""Child processes of a test: started with the same imports, killed on request, and always ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_report import count_process
from polling import PATIENCE_S


class BoundedPopen(subprocess.Popen[Any]):
    """A process that is waited for only so long; then it is killed, and the test fails.

    It replaces `subprocess.Popen` in all tests, because the end of a `with` block waits, too.
    """

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            return self._wait_for(timeout)
        try:
            return self._wait_for(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _wait_for(self, timeout: float) -> int:
        return count_process(self.args, lambda: super(BoundedPopen, self).wait(timeout))


class Child:
    """A Python program whose lines the test reads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> str:
        """Return its next line; fail if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended with {self._process.wait()}"
        return line.strip()

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.kill()
        self._process.wait()


@contextmanager
def running(script: Path, *arguments: str) -> Iterator[Child]:
    """Run `script` in another process, which is killed at the end if it still runs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def children(parent: int, containing: str) -> list[int]:
    """Return the live processes of `parent` whose command contains `containing`."""
    return [
        pid for pid, of, state, command in _seen() if of == parent and containing in command and state != "Z"
    ]


def is_alive(pid: int) -> bool:
    return any(pid == known and state != "Z" for known, _, state, _ in _seen())


def _seen() -> list[tuple[int, int, str, str]]:
    """Yield every process: its id, its parent's, its state and its command line."""
    return [
        seen for folder in Path("/proc").iterdir() if folder.name.isdigit() and (seen := _process(folder))
    ]


def _process(folder: Path) -> tuple[int, int, str, str] | None:
    """Return one process as /proc shows it, or None if it has ended meanwhile."""
    try:
        stat = (folder / "stat").read_text()
        command = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat.rpartition(")")[2].split()[
        :2
    ]  # the name before it may contain spaces and parentheses
    return int(folder.name), int(parent), state, command.decode(errors="replace")


def hide_module(name: str, folder: Path) -> dict[str, str]:
    """Return environment variables with which Python finds no module `name`; `folder` gets the file that hides it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{name!r}] = None\n")
    return {"PYTHONPATH": str(folder)}
