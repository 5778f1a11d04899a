"""Child processes of a test: started with the same imports, always ended, and killed where the test says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Child:
    """A Python program whose lines the test reads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> str:
        """Its next line, once it comes; fails if there is none."""
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
    """`script` in a process of its own; it is killed at the end, if it is still there."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Child(process)
        finally:
            process.kill()
