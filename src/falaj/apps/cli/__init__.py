"""The command line: `falaj`."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command that was typed, and exit with its status."""
    try:
        signal.signal(signal.SIGTERM, _terminate)
        from falaj.apps.cli.app import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except Terminated:
        sys.exit(143)


class Terminated(BaseException):
    """SIGTERM arrived: a home that is open in this process is closed, and with it what it runs."""


def _terminate(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the second one does not interrupt the closing
    raise Terminated
