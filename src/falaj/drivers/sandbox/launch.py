"""Runs a user's command behind a privileged launcher without showing the launcher the user's environment.

bwrap, setpriv and unshare start with an empty environment: with the user's own, LD_PRELOAD would run the
user's library inside them, before they give up their rights. The environment travels in an anonymous file,
since command lines are public, and the last step, which has no rights left, applies it and the seccomp filter.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falaj.drivers.memory_file import create_memory_file
from falaj.drivers.sandbox import last_step, seccomp
from falaj.ports.sandbox import UserCode


def launch(
    launcher: Sequence[str],
    code: UserCode,
    rules: Sequence[seccomp.SyscallRule],
    *,
    python: str,
    stdout: int,
    stderr: int,
    landlock: Mapping[str, Any] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `launcher`, which ends by running the user's command in its directory and environment, under `rules`.

    `landlock` is what the last step does beside that, where no launcher did it before.
    """
    program = seccomp.program(rules if code.children else [*seccomp.lone_process_rules(), *rules])
    plan = {
        "landlock": landlock,
        "filter": None if program is None else base64.b64encode(program).decode(),
        "directory": str(code.directory.absolute()),
        "command": list(code.command),
        "environment": dict(code.environment),
    }
    text = Path(last_step.__file__).read_text(encoding="utf-8")
    with open(create_memory_file("plan"), "w", encoding="ascii") as sent:
        json.dump(plan, sent)
        sent.flush()
        sent.seek(0)
        return subprocess.Popen(
            [*launcher, python, "-I", "-S", "-c", text, str(sent.fileno())],
            cwd="/",
            env={},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(sent.fileno(),),
            start_new_session=True,
        )
