"""The supervisor of one attempt: it outlives the platform, and the user's code does not outlive it.

    python -m falaj.drivers.processes.supervisor FOLDER < SECRETS

SECRETS is one JSON object, which is kept in memory only. If it is incomplete, the sender was killed, and nothing is
started. The command returns as soon as its child process, the supervisor, holds the lock of FOLDER, or if another
supervisor holds it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from falaj.drivers.processes.attempt_folder import AttemptFolder


def main(path: Path) -> None:
    folder = AttemptFolder(path)
    secrets = read_secrets()
    lock = folder.acquire()
    if lock is None or os.fork():
        return
    try:
        redirect_output(folder.error_log)
        if secrets:  # a core dump, ours or of a descendant, would write them to disk
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Imported late: it takes a while, and the launcher no longer waits.
        from falaj.drivers.processes.supervisor.attempt import supervise

        supervise(folder, secrets)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def read_secrets() -> dict[str, str]:
    try:
        secrets: dict[str, str] = json.loads(sys.stdin.buffer.read())
    except ValueError:
        sys.exit("the process that started the supervisor was killed")  # the error itself would show secrets
    return secrets


def redirect_output(error_log: Path) -> None:
    """Redirect our output to `error_log`, so that the launcher no longer waits for it."""
    target = os.open(error_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
