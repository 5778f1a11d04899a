"""Runs the programs that builds use, and reports what they print."""

from __future__ import annotations

import errno
import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from falaj.errors import Unavailable

Report = Callable[[str], None]
"""Called with each line of progress."""

KEPT_LINES = 60


@dataclass(frozen=True)
class Finished:
    """How a program ended, and the last lines that it printed."""

    code: int
    lines: list[str]


def run_program(
    command: Sequence[str], report: Report, *, environment: Mapping[str, str] | None = None
) -> Finished:
    """Run a program to its end. It is killed if this process is interrupted meanwhile."""
    kept = deque[str](maxlen=KEPT_LINES)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error.strerror}") from error
    with process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            for line in process.stdout:
                if line.strip():
                    kept.append(line.strip())
                    report(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode and any("No space left on device" in line for line in kept):
        raise OSError(errno.ENOSPC, "No space left on device")
    return Finished(process.returncode, list(kept))
