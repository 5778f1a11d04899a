"""The process that watches over one attempt: it outlives the platform, and the user's code does not outlive it.

    python -m falaj.drivers.processes.supervisor FOLDER < SECRETS

SECRETS are one JSON object, which is kept in memory only; if it does not come whole, whoever sent it was killed, and
nothing is started. Returns as soon as another process, which stays, has the folder's lock; or if somebody else has it.
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
        if secrets:  # a core, ours or that of any process below us, would have them on a disk
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Only now, since it takes a while, and nobody waits for it.
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
        sys.exit("whoever started it went away meanwhile")  # and the error would tell of the secrets
    return secrets


def redirect_output(error_log: Path) -> None:
    """Let go of whoever waits for our output; from here on, faults of ours are written down."""
    target = os.open(error_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
