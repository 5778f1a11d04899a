"""Starts user code with the platform's own rights: nothing is protected from it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from falaj.ports.sandbox import PROMISES, Gap, Mechanism, UserCode


@dataclass(frozen=True)
class SameUidSandbox:
    """A plain child process. For a home with one user, whose own code it is."""

    @property
    def name(self) -> Mechanism:
        return "same-uid"

    @property
    def gaps(self) -> tuple[Gap, ...]:
        kept = ("renames", "gpus")
        return tuple(
            Gap(promise, f"not kept: {words}") for promise, words in PROMISES.items() if promise not in kept
        )

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
