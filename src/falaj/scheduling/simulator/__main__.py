"""The process of a replay, so that its long computation does not block the controller.

Input, as lines of JSON: the question, the past attempts, then an empty line. Output, as lines of JSON: progress, and at
the end the comparison or an error. It exits when its input is closed, and has no access to the platform.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

from falaj.errors import FalajError
from falaj.records.scheduling.accounting import PastAttempt
from falaj.records.scheduling.simulation import WhatIfQuestion
from falaj.scheduling.simulator.history import answer

PROGRESS_EVERY_S = 0.25
NICER = 5
"""Processes of the platform have priority."""


def main() -> None:
    os.nice(NICER)
    source, out = sys.stdin.buffer, sys.stdout.buffer
    try:
        question = WhatIfQuestion.model_validate_json(source.readline())
        found = answer(question, _attempts(source), progress=ProgressLines(out))
        _write_line(out, {"comparison": found.model_dump(mode="json")})
    except FalajError as error:
        _write_line(out, {"refused": [error.code, error.message]})
    except Exception:
        _write_line(out, {"failed": traceback.format_exc()})


def _attempts(source: BinaryIO) -> Iterator[PastAttempt]:
    while line := source.readline():
        if line == b"\n":
            threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
            return
        yield PastAttempt.model_validate_json(line)
    os._exit(1)  # the parent is gone


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


class ProgressLines:
    """Writes progress lines at most every PROGRESS_EVERY_S."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._next = out, 0.0

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_EVERY_S
            _write_line(self._out, {"done": done, "of": of})


def _write_line(out: BinaryIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    main()
