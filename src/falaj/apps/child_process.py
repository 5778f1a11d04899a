"""Runs a module as a process of the platform: an error that ends it goes to its log, and its cause to its parent.

python -m falaj.apps.child_process MODULE ARGUMENTS...

Imports nothing else of Falaj at first, so that an import that fails is reported like every other error.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

LOG, CAUSE_FD = "FALAJ_PROCESS_LOG", "FALAJ_CAUSE_FD"
"""Variables: the log of the process, and the descriptor on which its parent reads why it ended."""


def main() -> None:
    """Run the module that the arguments name; exit 1 after an error that it did not handle."""
    log, cause = Path(os.environ.pop(LOG)), int(os.environ.pop(CAUSE_FD))
    os.set_inheritable(cause, False)
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        report(error, log=log, cause=cause)
        sys.exit(1)


def report(error: Exception, *, log: Path, cause: int) -> None:
    """Write the traceback to the log, or to standard error where there is none, and the cause to the parent."""
    from falaj.apps.logs import log_to, redact
    from falaj.control.repeated_failures import describe_cause

    with suppress(OSError):
        os.write(cause, redact(describe_cause(error)).encode(errors="backslashreplace"))
    if not logging.getLogger().handlers:
        try:
            log_to(log)
        except OSError:
            log_to(None)
    logging.getLogger("falaj.process").critical("the process failed", exc_info=error)


if __name__ == "__main__":
    main()
