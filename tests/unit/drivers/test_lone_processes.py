"""User code that may start no process: in every sandbox that works here it has threads, and nothing else."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from falaj.assembly.parsing import find_sandboxes
from falaj.ports.sandbox import Sandbox, UserCode

THREAD = "import threading; t = threading.Thread(target=print, args=['thread']); t.start(); t.join()\n"
ATTEMPTS = """
import ctypes, os, subprocess
def attempt(what):
    try:
        return f"started {what()}"
    except OSError as error:
        return type(error).__name__
print(attempt(os.fork))
print(attempt(lambda: subprocess.run(["true"])))
print(attempt(lambda: os.posix_spawn("/bin/true", ["true"], {})))
print(ctypes.CDLL(None).vfork())
"""

SEPARATING = [sandbox for sandbox in find_sandboxes() if sandbox.name != "same-uid"]
EACH = pytest.mark.parametrize("sandbox", SEPARATING, ids=lambda sandbox: sandbox.name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can reach, as `tmp_path` is not."""
    with tempfile.TemporaryDirectory(prefix="falaj-lone-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "job").mkdir()
        yield Path(name) / "job"


def output_of(sandbox: Sandbox, text: str, folder: Path, *, children: bool) -> list[str]:
    command = [sys.executable, "-I", "-c", text]
    read, write = os.pipe()
    with os.fdopen(read) as output:
        code = UserCode(command, folder, environment={"PATH": os.defpath}, children=children)
        process = sandbox.start(code, stdout=write, stderr=2)
        os.close(write)
        lines = output.read().splitlines()
        process.wait()
    return lines


@EACH
def test_only_threads_are_started_without_children(sandbox: Sandbox, folder: Path) -> None:
    lines = output_of(sandbox, THREAD + ATTEMPTS, folder, children=False)

    assert lines == ["thread", *["PermissionError"] * 3, "-1"]


@EACH
def test_processes_are_started_otherwise(sandbox: Sandbox, folder: Path) -> None:
    text = THREAD + "import subprocess; print(subprocess.run(['true']).returncode)"

    assert output_of(sandbox, text, folder, children=True) == ["thread", "0"]
