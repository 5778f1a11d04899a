"""A replay that runs beside us: told what to replay, looked at now and then, ended when nobody wants it any more."""

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
"""Of our environment; there may be secrets in the rest."""


class ReplayProcess:
    """Python computes on one processor at a time, so a replay in a thread of ours would slow down all the others."""

    def __init__(self, question: WhatIfQuestion, attempts: Iterable[PastAttempt]) -> None:
        """`attempts` are read in a thread that acts for the caller."""
        self.progress: tuple[int, int] | None = None
        self._told: dict[str, Any] = {}
        self._failure: FalajError | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # a Ctrl-C at the terminal is not meant for it
        )
        self._in, self._out = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._talk = start_thread(self._converse, question, attempts, name="replay")

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> WhatIfComparison | None:
        """What came of it; none while it goes on."""
        if self._talk.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        if "comparison" in self._told:
            return WhatIfComparison.model_validate(self._told["comparison"])
        if "refused" in self._told:
            code, message = self._told["refused"]
            raise rebuild(code, message, [], {})
        if "failed" in self._told:
            log.error("a replay failed", extra={"reason": self._told["failed"]})
            raise Internal("the replay failed; the controller's log says why")
        raise Internal(f"the process of the replay {_how_it_ended(self._process.wait())}")

    def stop(self) -> None:
        """End it, if it has not ended; when this returns it is gone."""
        self._process.kill()
        self._talk.join()
        self._process.wait()
        self._out.close()
        with suppress(BrokenPipeError):  # by what it was not told any more
            self._in.close()

    def _converse(self, question: WhatIfQuestion, attempts: Iterable[PastAttempt]) -> None:
        try:
            with suppress(BrokenPipeError):  # it has ended; how, is seen below
                self._ask(question, attempts)
            self._listen()
        except FalajError as error:
            self._failure = error
        except Exception:
            log.exception("a replay could not be told what to replay")
            self._failure = Internal("the replay failed; the controller's log says why")

    def _ask(self, question: WhatIfQuestion, attempts: Iterable[PastAttempt]) -> None:
        self._in.write(question.model_dump_json().encode() + b"\n")
        for attempt in attempts:
            self._in.write(attempt.model_dump_json().encode() + b"\n")
        self._in.write(b"\n")
        self._in.flush()

    def _listen(self) -> None:
        for line in self._out:
            with suppress(ValueError):  # it was killed in the middle of a line
                self._told = json.loads(line)
                if "of" in self._told:
                    self.progress = self._told["done"], self._told["of"]


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in HANDED_ON if name in os.environ}


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    why = "; perhaps memory ran out" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{why}"
