"""Starts user code with the platform's own rights: nothing is protected from it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from falaj.ports.sandbox import Mechanism, UserCode


@dataclass(frozen=True)
class SameUidSandbox:
    """A plain child process. For a home with one user, whose own code it is."""

    @property
    def name(self) -> Mechanism:
        return "same-uid"

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(code.command),
            cwd=code.directory,
            env=dict(code.environment),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
