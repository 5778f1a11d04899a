"""Start, poll and stop the process of a replay."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO, cast

from falaj.errors import FalajError, Internal, rebuild
from falaj.governance.operations.caller import start_thread
from falaj.records.scheduling.accounting import PastAttempt
from falaj.records.scheduling.simulation import WhatIfComparison, WhatIfQuestion

log = logging.getLogger("falaj.replay")

PROGRAM = "falaj.scheduling.simulator"
HANDED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Environment variables passed on; the others may hold secrets."""


class ReplayProcess:
    """A replay in its own process: in a thread it would hold the GIL and slow down the controller."""

    def __init__(self, question: WhatIfQuestion, attempts: Iterable[PastAttempt]) -> None:
        """Start the process; a thread that acts for the caller reads `attempts`."""
        self.progress: tuple[int, int] | None = None
        self._message: dict[str, Any] = {}
        self._failure: FalajError | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # not to receive Ctrl-C of the terminal
        )
        self._in, self._out = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._thread = start_thread(self._exchange, question, attempts, name="replay")

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> WhatIfComparison | None:
        """Return the comparison, or None while the replay runs; raise its error if it failed."""
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        if "comparison" in self._message:
            return WhatIfComparison.model_validate(self._message["comparison"])
        if "refused" in self._message:
            code, message = self._message["refused"]
            raise rebuild(code, message, [], {})
        if "failed" in self._message:
            log.error("replay failed", extra={"reason": self._message["failed"]})
            raise Internal("the replay failed; the controller's log says why")
        raise Internal(f"the replay process {_describe_exit(self._process.wait())}")

    def stop(self) -> None:
        """Kill the process if it still runs, and wait for its end."""
        self._process.kill()
        self._thread.join()
        self._process.wait()
        self._out.close()
        with suppress(BrokenPipeError):  # of unsent input
            self._in.close()

    def _exchange(self, question: WhatIfQuestion, attempts: Iterable[PastAttempt]) -> None:
        try:
            with suppress(BrokenPipeError):  # it has exited; `look` reports how
                self._send(question, attempts)
            self._receive()
        except FalajError as error:
            self._failure = error
        except Exception:
            log.exception("failed to send the input of a replay")
            self._failure = Internal("the replay failed; the controller's log says why")

    def _send(self, question: WhatIfQuestion, attempts: Iterable[PastAttempt]) -> None:
        self._in.write(question.model_dump_json().encode() + b"\n")
        for attempt in attempts:
            self._in.write(attempt.model_dump_json().encode() + b"\n")
        self._in.write(b"\n")
        self._in.flush()

    def _receive(self) -> None:
        for line in self._out:
            with suppress(ValueError):  # a partial line of a killed process
                self._message = json.loads(line)
                if "of" in self._message:
                    self.progress = self._message["done"], self._message["of"]


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in HANDED_ON if name in os.environ}


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    why = "; it may have run out of memory" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{why}"
