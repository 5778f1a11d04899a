"""Child processes of a test: started with the same imports, always ended, killed where the test says so, and found."""

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


def children(parent: int, saying: str) -> list[int]:
    """The living processes of `parent` whose command has `saying` in it."""
    return [pid for pid, of, stat, said in _seen() if of == parent and saying in said and stat[0] != "Z"]


def is_alive(pid: int) -> bool:
    return any(pid == known and stat[0] != "Z" for known, _, stat, _ in _seen())


def _seen() -> list[tuple[int, int, str, str]]:
    """Every process: its id, its parent's, its state and its command, at any width of the terminal."""
    command = ["ps", "-ww", "-Ao", "pid=,ppid=,stat=,args="]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = (line.split(None, 3) for line in told.stdout.splitlines())
    return [(int(row[0]), int(row[1]), row[2], row[3]) for row in rows if len(row) == 4]
