"""The testbed of the sandbox tests: user code in a sandbox, and a platform process beside it."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falaj.drivers.sandbox import probe
from falaj.governance.isolation import Isolation
from falaj.ports.sandbox import MachineFacts, Mechanism, Sandbox, UserCode
from polling import PATIENCE_S

PLAIN = {"LC_ALL": "C.UTF-8"}

PLATFORM = """
import ctypes, json, os, select, socket, sys
word = ctypes.create_string_buffer(os.environ["WORD"].encode())
listener = socket.create_server(("127.0.0.1", 0))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
abstract = f"falaj-{os.getpid()}"
by_name, by_path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
by_name.bind("\\0" + abstract)
os.chdir(sys.argv[1])
if os.path.lexists("platform.sock"):
    os.unlink("platform.sock")
by_path.bind("platform.sock")
by_name.listen()
by_path.listen()
print(json.dumps({
    "pid": os.getpid(), "address": ctypes.addressof(word), "length": len(word), "port": listener.getsockname()[1],
    "datagram_port": datagrams.getsockname()[1], "abstract": abstract, "unix": os.path.abspath("platform.sock"),
}), flush=True)
while True:
    ready, _, _ = select.select([sys.stdin, datagrams], [], [])
    if sys.stdin in ready:
        break
    received, sender = datagrams.recvfrom(100)
    datagrams.sendto(received, sender)
"""


@dataclass(frozen=True)
class SandboxTestbed:
    """A sandbox, the decision that chose it, and a folder that every uid may enter."""

    sandbox: Sandbox
    isolation: Isolation
    facts: MachineFacts
    root: Path

    def code(self, *command: str, job: str = "job", **options: Any) -> UserCode:
        directory = self.root / "jobs" / job
        directory.mkdir(parents=True, exist_ok=True)
        return UserCode(command=command, directory=directory, **{"environment": PLAIN, **options})

    def python(self, script: str, *arguments: str, **options: Any) -> UserCode:
        return self.code(self.facts.python, "-c", script, *arguments, **options)

    def run(self, code: UserCode) -> subprocess.CompletedProcess[bytes]:
        with self.started(code, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
            return subprocess.CompletedProcess(code.command, process.returncode, out, err)

    @contextmanager
    def started(
        self, code: UserCode, *, stderr: int = subprocess.DEVNULL
    ) -> Iterator[subprocess.Popen[bytes]]:
        process = self.sandbox.start(code, stdout=subprocess.PIPE, stderr=stderr)
        with process:
            try:
                yield process
            finally:
                kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def machine(mechanism: Mechanism) -> MachineFacts:
    """Return this machine's facts; as another uid, with the first Python that the uid can reach."""
    pythons = [sys.executable, "/usr/bin/python3"] if mechanism in ("landlock", "uid") else [sys.executable]
    tried = [probe(python=python) for python in pythons if Path(python).exists()]
    if mechanism == "landlock":
        return next((facts for facts in tried if facts.landlock_own_uid), tried[0])
    return next((facts for facts in tried if facts.uid_works), tried[0])


@contextmanager
def running_platform(secret: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with a secret in its memory and environment, which listens in several ways and prints where.

    `folder` holds its unix socket.
    """
    environment = {**os.environ, "WORD": secret}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PLATFORM, str(folder)], stdin=pipe, stdout=pipe, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the first line of its output; later lines may be in a buffer."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    assert ready, "no line within the deadline"
    return process.stdout.readline()


def ended(output: int) -> bool:
    """Return whether all holders of the other end of a pipe are gone before the deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := deadline - time.monotonic()) > 0:
        if select.select([output], [], [], left)[0] and not os.read(output, 4096):
            return True
    return False
