"""Runs a user's command behind a privileged launcher without showing the launcher the user's environment.

bwrap, setpriv and unshare start with an empty environment: with the user's own, LD_PRELOAD would run the
user's library inside them, before they give up their rights. The environment travels in an anonymous file,
since command lines are public, and the last step, which has no rights left, applies it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence

from falaj.ports.sandbox import UserCode

# Python ignores SIGPIPE and SIGXFSZ, and a program started by exec inherits that unless it is undone here.
LAST_STEP = """\
import json, os, signal, sys
sent, directory, *command = sys.argv[1:]
with open(int(sent), encoding="ascii") as file:
    environment = json.load(file)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.chdir(directory)
    os.execvpe(command[0], command, environment)
except (OSError, ValueError) as error:
    print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)
"""


def launch(
    launcher: Sequence[str], code: UserCode, *, python: str, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start `launcher`, which ends by running the user's command in its directory and environment."""
    with open(os.memfd_create("environment"), "w", encoding="ascii") as sent:
        json.dump(dict(code.environment), sent)
        sent.flush()
        sent.seek(0)
        number, directory = str(sent.fileno()), str(code.directory.absolute())
        return subprocess.Popen(
            [*launcher, python, "-I", "-S", "-c", LAST_STEP, number, directory, *code.command],
            cwd="/",
            env={},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(sent.fileno(),),
            start_new_session=True,
        )
